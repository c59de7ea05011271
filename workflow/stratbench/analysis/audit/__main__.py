"""`python -m stratbench.analysis.audit`."""

import sys

from stratbench.analysis.audit import main

sys.exit(main())
