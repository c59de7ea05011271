"""What pyproject.toml cannot say: a wheel carries the workflow's files beside the package.

They keep their paths of a clone, below stratbench/_repository; `stratbench.cell.installation` finds them.
"""

import json
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CARRIED = (
    "Snakefile", "config.yaml", "envs/*", "profiles/*/config.yaml", "workflow/rules/*.smk",
    "workflow/schemas/*.json", "workflow/reference/*.csv", "workflow/report/*.rst",
)  # fmt: skip


def carried() -> list[str]:
    """The files to carry, by their paths below the root."""
    found = [path for pattern in CARRIED for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    return [path.relative_to(ROOT).as_posix() for path in found]


def git(*arguments: str) -> str | None:
    """What git says of this checkout; None where it is none."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class BuildWithWorkflow(build_py):
    """Builds the package, and puts the workflow's files into it."""

    @property
    def _carried_into(self) -> Path:
        return Path(self.build_lib, "stratbench", "_repository")

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in carried():
            target = self._carried_into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(ROOT / name), str(target), preserve_mode=False)
        # A record names the code that it was made with; an unpacked sdist is in no checkout of its own.
        revision = git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
        if revision is not None:
            changed = bool(git("status", "--porcelain", "--untracked-files=no"))
            state = json.dumps({"revision": revision, "dirty": changed})
            (self._carried_into / "git.json").write_text(state + "\n", encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [
            *super().get_outputs(include_bytecode),
            *(str(self._carried_into / name) for name in [*carried(), "git.json"]),
        ]

    def get_source_files(self) -> list[str]:
        """What an sdist needs, so that a wheel can be built from it."""
        return [*super().get_source_files(), *carried()]


setup(cmdclass={"build_py": BuildWithWorkflow})
