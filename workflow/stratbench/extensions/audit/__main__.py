"""Command line of the audit: runs all rules on a study, and writes audit.csv."""

import sys

from stratbench.extensions.audit.audit import main

if __name__ == "__main__":
    sys.exit(main())
