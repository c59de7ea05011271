"""`python -m stratbench.analysis.audit`: runs the audit on a study and writes audit.csv."""

from stratbench.analysis.audit import main
from stratbench.cell.ending import end_process

end_process(main())
