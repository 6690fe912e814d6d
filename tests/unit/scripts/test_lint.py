"""What `make lint` refuses in the package: time and randomness that are not passed in. Nor are callbacks set later."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = """
import datetime, os, random, secrets, time, uuid
time.monotonic()
datetime.datetime.now(), datetime.datetime.utcnow(), datetime.datetime.today(), datetime.date.today()
os.urandom(1), os.getrandom(1), random.SystemRandom(), uuid.uuid1(), uuid.uuid4()
"""
REFUSED = {
    *("time", "secrets", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today"),
    *("datetime.date.today", "os.urandom", "os.getrandom", "random.SystemRandom", "uuid.uuid1", "uuid.uuid4"),
}


def test_a_clock_or_randomness_that_is_not_passed_in_is_refused() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise", "-"]
    options = ["--stdin-filename", "src/lmcache/core/probe.py"]
    done = subprocess.run([*command, *options], input=SOURCE, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {line.split("`")[1] for line in done.stdout.splitlines() if "TID251" in line}
    assert found == REFUSED, done.stderr


def test_no_part_is_called_back_by_what_another_one_sets() -> None:
    """A callback is an argument of the constructor."""
    set_from_outside = re.compile(r"^\s*(?!self\.on_)\w[\w.]*\.on_\w+ = .*", re.MULTILINE)
    assert len(set_from_outside.findall("        self.instances.on_left = self.intake.forget\n    a.on_x = b")) == 2
    assert not set_from_outside.findall("        self.on_x = on_x")
    found = {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / "src").rglob("*.py")
        if (found := set_from_outside.findall(path.read_text()))
    }
    assert not found
