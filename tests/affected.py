"""`pytest --affected[=REV]` runs the test files that a change can reach (`reach.py`).

The change is what the checkout has on top of REV: commits, what is not committed, new files. By
default REV is where the branch left its upstream, or HEAD where it has none. A change of how tests
are run reaches all of them.
"""

import re
import subprocess
from pathlib import Path

import pytest
from reach import Checkout

EVERYWHERE = ("pyproject.toml", "tests/conftest.py", "tests/kernels_of_tier.py")
HELP = "run what a change can reach: the one since REV, by default since the upstream"


LINE = pytest.StashKey[str]()
FOUND = pytest.StashKey[set]()


def pytest_addoption(parser):
    """Take `--affected`."""
    parser.addoption("--affected", metavar="REV", nargs="?", const="", help=HELP)


def pytest_configure(config):
    """Find what the change reaches once, where pytest is started; workers of xdist are told."""
    if config.getoption("affected") is None:
        return
    if hasattr(config, "workerinput"):
        config.stash[FOUND] = set(config.workerinput["affected"])
        return
    changed = changes(config.rootpath, config.getoption("affected"))
    known = git(config.rootpath, "ls-files", "--cached", "--others", "--exclude-standard")
    tests, config.stash[FOUND] = affected(config.rootpath, known, changed)
    count = len(config.stash[FOUND])
    config.stash[LINE] = (
        f"affected: {len(changed)} changed files reach {count} of {len(tests)} test files"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker, which collects for itself."""
    node.workerinput["affected"] = sorted(node.config.stash.get(FOUND, ()))


def pytest_sessionstart(session):
    """Print how much the change reaches."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and LINE in session.config.stash:
        reporter.ensure_newline()
        reporter.write_line(session.config.stash[LINE])


def pytest_ignore_collect(collection_path, config):
    """Leave out files of tests that the change does not reach."""
    if FOUND not in config.stash or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return None if name in config.stash[FOUND] else True


def pytest_sessionfinish(session, exitstatus):
    """Let a change that reaches no test be no failure."""
    none = not session.config.stash.get(FOUND, True)
    if none and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def affected(root, files, changed):
    """Return the files of tests of a checkout, and those that changed files reach.

    Args:
        root: Its folder.
        files: Its files, by path from there.
        changed: Those that have changed; some may be gone.
    """
    checkout = Checkout(root, {*files, *changed})
    tests = [test for test in checkout.tests if (root / test).is_file()]
    if changed & set(EVERYWHERE):
        return tests, set(tests)
    return tests, {test for test in tests if checkout.reached_by(test) & changed}


def changes(root, revision):
    """Return the files that differ from a revision, those that git does not know yet included."""
    base = revision or upstream(root)
    if not git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", fails=[]):
        raise pytest.UsageError(f"--affected={base}: git knows no such commit here")
    differ = git(root, "diff", "--name-only", "--no-renames", base)
    return {*differ, *git(root, "ls-files", "--others", "--exclude-standard")}


def upstream(root):
    """Return where the branch left its upstream, or HEAD."""
    (base,) = git(root, "merge-base", "HEAD", "@{upstream}", fails=["HEAD"])
    return base


def git(root, *arguments, fails=None):
    """Return the lines that git prints; `fails` where it has a fault to find."""
    ran = subprocess.run(
        ["git", "-c", "core.quotePath=off", *arguments],
        cwd=Path(root),
        capture_output=True,
        text=True,
    )
    if ran.returncode and fails is not None:
        return fails
    if ran.returncode:
        raise pytest.UsageError(f"--affected: git {arguments[0]}: {ran.stderr.strip()}")
    return ran.stdout.splitlines()
