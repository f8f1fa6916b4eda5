"""What is left of a file whose writing was killed, and of one that is being written."""

import subprocess
import sys
from pathlib import Path

from fasttrain.whole_files import remove_halves_of, write_whole

WRITING = """
import sys, time
from pathlib import Path
from fasttrain.whole_files import write_whole
with write_whole(Path(sys.argv[1])) as stream:
    stream.write(b"half")
    stream.flush()
    print("begun", flush=True)
    time.sleep(60)
"""


def test_what_was_killed_is_removed_and_what_is_at_work_stays(tmp_path: Path) -> None:
    target = tmp_path / "a.nii.gz"
    started = [
        subprocess.Popen([sys.executable, "-c", WRITING, str(target)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
        killed, at_work = started
        killed.kill()
        killed.wait()
        (tmp_path / f".b.nii.gz.{killed.pid}.part").touch()
        with write_whole(target) as stream:
            stream.write(b"whole")
            remove_halves_of(tmp_path, ["a.nii.gz"])
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"a.nii.gz", f".a.nii.gz.{at_work.pid}.part", f".b.nii.gz.{killed.pid}.part"}
    finally:
        for process in started:
            process.kill()
            process.communicate()
