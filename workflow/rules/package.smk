# Finds the Python package. It lies beside these rules, and not beside the Snakefile that was started: that
# may be another workflow's, which uses this one as a module. A module on a git host has no files here: its
# repository, which Snakemake has fetched, is cloned to .snakemake/stratbench/<commit>. An installed wheel
# has these rules inside the package; the package is copied to .snakemake/stratbench/<version>.
import sys
import tempfile
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.sourcecache import HostingProviderFile, LocalSourceFile

COPIES = Path(".snakemake/stratbench")


def clone_of(repository, commit):
    """The folder of a clone at a commit, in the folder of this run: a cluster's nodes see it too."""
    import git  # needs the program git, as nothing else here does

    folder = (COPIES / commit).resolve()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            clone = Path(unfinished, "clone")
            source = repository.git_dir
            git.Repo.clone_from(source, clone, no_checkout=True).git.checkout(commit)
            try:
                clone.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another job was faster
                    raise
    return folder


def installed(folder):
    """The folder to import from, where `folder`, of the rules, is stratbench/_repository/workflow of a wheel."""
    sys.path.insert(0, str(folder.parents[2]))
    from stratbench.cell.installation import package_folder

    del sys.path[0]
    return package_folder(COPIES)


def package_root(rules):
    """The folder to import `stratbench` from. `rules`: the folder of this file, as Snakemake knows it."""
    if isinstance(rules, LocalSourceFile):
        folder = Path(rules.get_path_or_uri(secret_free=True)).parent
        return folder if (folder / "stratbench").is_dir() else installed(folder)
    if isinstance(rules, HostingProviderFile):
        repository = rules.hosted_repo.repo
        return clone_of(repository, repository.commit(rules.ref).hexsha) / "workflow"
    raise WorkflowError(
        "stratbench is more than its rules: give the module as a path, or as github(…) or gitlab(…), and "
        f"not as {rules.get_path_or_uri(secret_free=True)}"
    )


PACKAGE_ROOT = str(package_root(workflow.current_basedir))
if PACKAGE_ROOT not in sys.path:
    sys.path.insert(0, PACKAGE_ROOT)
