"""What pyproject.toml cannot say: extras, and that a wheel carries the workflow's files beside the package.

They keep their paths of a clone, below stratbench/_repository; `stratbench.cell.installation` finds them.
An sdist has all of MANIFEST.in, and the git revision that it was made from.
"""

import json
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
#: Written into an sdist, which is no checkout.
GIT_STATE = ROOT / "git.json"
CARRIED = (
    "Snakefile", "config.yaml", "envs/*", "profiles/*/config.yaml", "workflow/rules/*.smk",
    "workflow/schemas/*.json", "workflow/reference/*.csv", "workflow/report/*.rst",
)  # fmt: skip


def carried() -> list[str]:
    """The files to carry, by their paths below the root."""
    found = [path for pattern in CARRIED for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    return [path.relative_to(ROOT).as_posix() for path in found]


def extra(name: str) -> list[str]:
    """Return the packages of an extra: the tested versions or newer ones, of DeepSpeed the tested one."""
    lines = (ROOT / f"envs/requirements-{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    return pins if name == "deepspeed" else [pin.replace("==", ">=") for pin in pins]


def git(*arguments: str) -> str | None:
    """Return what git says of this checkout; None if it is none."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_git_state(folder: Path) -> None:
    """Write the revision that is built, which records name; nothing if it is unknown."""
    if GIT_STATE.exists():
        text = GIT_STATE.read_text(encoding="utf-8")
    # An sdist or a copy may be unpacked in somebody else's checkout.
    elif (ROOT / ".git").exists() and (revision := git("rev-parse", "HEAD")) is not None:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        text = json.dumps({"revision": revision, "dirty": changed}) + "\n"
    else:
        return
    (folder / GIT_STATE.name).write_text(text, encoding="utf-8")


class SdistWithRevision(sdist):
    """Makes an sdist that knows its git revision."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_git_state(Path(base_dir))


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
        write_git_state(self._carried_into)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [
            *super().get_outputs(include_bytecode),
            *(str(self._carried_into / name) for name in [*carried(), "git.json"]),
        ]


setup(
    cmdclass={"build_py": BuildWithWorkflow, "sdist": SdistWithRevision},
    extras_require={name: extra(name) for name in ("deepspeed", "export", "transformers")},
)
