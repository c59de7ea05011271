"""`python -m stratbench.analysis.audit`: runs the audit on a study and writes audit.csv."""

import sys

from stratbench.analysis.audit import main
from stratbench.cell.files import in_one_sentence

if __name__ == "__main__":
    sys.exit(in_one_sentence(main))
