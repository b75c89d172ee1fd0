from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpjax.checkpoint import staging
from mpjax.checkpoint.staging import clean_up, staged


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def read(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def write(folder, content="new"):
    with staged(folder) as new:
        (new / "file").write_text(content)


@pytest.fixture(autouse=True)
def interrupts_raise():
    """As in a shell's foreground: what a shell starts in its background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=[True, False], ids=["old", "nothing"])
def before(request, tmp_path):
    """The folder's content before: a file, or nothing."""
    if not request.param:
        return None
    write(tmp_path / "saved", "old")
    return {"file": "old"}


def require_before(folder, before):
    assert names(folder) == ([] if before is None else ["saved"])
    assert before is None or read(folder / "saved") == before


def test_the_new_folder_takes_the_old_one_s_place(before, tmp_path):
    write(tmp_path / "saved")
    assert read(tmp_path / "saved") == {"file": "new"}
    assert names(tmp_path) == ["saved"]
    write(tmp_path / "deeper" / "and" / "deeper")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert names(tmp_path) == ["deeper", "empty", "saved"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_changes_nothing(error, before, tmp_path):
    def save(name):
        with staged(tmp_path / name) as new:
            (new / "file").write_text("half")
            raise error

    with pytest.raises(error):
        save("saved")
    require_before(tmp_path, before)
    with pytest.raises(error):
        save("deeper/and/deeper")  # folders on the way are made, too
    require_before(tmp_path, before)


@pytest.mark.parametrize("stage", ["previous", "new"])
def test_a_change_that_fails_is_taken_back(stage, before, tmp_path, monkeypatch):
    rename = Path.rename

    def fail(source, target):
        if stage in (source.name, target.name) and source.name != "previous":
            raise OSError("no")
        return rename(source, target)

    if stage == "previous" and before is None:
        return  # nothing is moved there
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no"):
            write(tmp_path / "saved")
    require_before(tmp_path, before)


def test_all_is_on_the_disk_before_the_change(before, tmp_path, monkeypatch):
    events = []
    rename, sync = Path.rename, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: events.append("sync") or sync(file))
    monkeypatch.setattr(Path, "rename", lambda a, b: events.append("rename") or rename(a, b))
    with staged(tmp_path / "saved") as new:
        (new / "folder").mkdir()
        for path in (new / "file", new / "folder" / "file"):
            path.write_text("new")
    assert events == ["sync", "sync"] + ["rename"] * (2 if before else 1)


def test_an_interrupt_of_the_change_comes_after_it(before, tmp_path, monkeypatch):
    rename = Path.rename

    def interrupted(source, target):
        os.kill(os.getpid(), signal.SIGINT)
        moved = rename(source, target)
        os.kill(os.getpid(), signal.SIGINT)  # of an impatient person
        return moved

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "saved")
    assert names(tmp_path) == ["saved"]
    assert read(tmp_path / "saved") == {"file": "new"}
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_of_the_cleaning_comes_after_it(before, tmp_path, monkeypatch):
    delete = shutil.rmtree

    def interrupted(path, **options):
        os.kill(os.getpid(), signal.SIGINT)
        delete(path, **options)

    def save():
        with staged(tmp_path / "saved"):
            monkeypatch.setattr(shutil, "rmtree", interrupted)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    monkeypatch.undo()
    require_before(tmp_path, before)


def test_an_interrupt_of_the_beginning_comes_after_it(before, tmp_path, monkeypatch):
    lock = staging.try_to_lock

    def interrupted(file):
        os.kill(os.getpid(), signal.SIGINT)
        return lock(file)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "try_to_lock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "saved")
    require_before(tmp_path, before)


def test_a_beginning_that_fails_leaves_nothing(before, tmp_path, monkeypatch):
    make = Path.mkdir

    def full(path, *arguments, **options):
        if path.name == "new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / "saved")
    require_before(tmp_path, before)


def test_a_thread_can_save_too(tmp_path):
    thread = threading.Thread(target=write, args=(tmp_path / "saved",))
    thread.start()
    thread.join()
    assert read(tmp_path / "saved") == {"file": "new"}


def test_a_live_save_is_left_alone(before, tmp_path):
    folder = tmp_path / "saved"
    with staged(folder) as new:
        (new / "file").write_text("new")
        clean_up(folder)
        with pytest.raises(ValueError, match=r"another process is saving a model to .*/saved: wa"):
            write(folder, "of another process")
        assert read(new) == {"file": "new"}
    assert read(folder) == {"file": "new"}
    assert names(tmp_path) == ["saved"]


# Where a process is killed, as code that runs in it, and what must stand in the folder afterwards.
KILLS = {
    "writing": ("die()", "old"),
    "moved away": ("after(Path, 'rename', lambda new: new.name == 'previous')", "old"),
    "changed": ("after(Path, 'rename', lambda new: new.name == 'saved')", "new"),
    "deleting": ("before(shutil, 'rmtree', lambda path: path.name == 'previous')", "new"),
}
KILLED = """
import importlib.util, os, shutil, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("staging", sys.argv[1])
staging = importlib.util.module_from_spec(spec)
spec.loader.exec_module(staging)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def after(owner, name, condition):
    function = getattr(owner, name)
    def run(*args, **keywords):
        result = function(*args, **keywords)
        condition(result) and die()
        return result
    setattr(owner, name, run)
def before(owner, name, condition):
    function = getattr(owner, name)
    def run(path, **keywords):
        condition(path) and die()
        return function(path, **keywords)
    setattr(owner, name, run)
with staging.staged(Path(sys.argv[2])) as new:
    (new / "file").write_text("new")
    exec(sys.argv[3])
"""


def kill_while_saving(folder, how):
    arguments = [sys.executable, "-c", KILLED, staging.__file__, str(folder), KILLS[how][0]]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("how", KILLS)
def test_what_a_killed_process_left_is_cleaned_up(how, tmp_path):
    folder = tmp_path / "saved"
    write(folder, "old")
    kill_while_saving(folder, how)
    assert len(names(tmp_path)) == (1 if how == "moved away" else 2)
    clean_up(folder)
    assert names(tmp_path) == ["saved"]
    assert read(folder) == {"file": KILLS[how][1]}


def test_the_next_save_cleans_up(tmp_path):
    folder = tmp_path / "saved"
    write(folder, "old")
    kill_while_saving(folder, "moved away")
    assert not folder.exists()
    with staged(folder) as new:
        assert read(folder) == {"file": "old"}
        (new / "file").write_text("new")
    require_before(tmp_path, {"file": "new"})
    kill_while_saving(folder, "writing")
    write(folder, "newer")
    require_before(tmp_path, {"file": "newer"})


def test_the_only_copy_of_a_model_is_kept(tmp_path):
    """Something else has been put in the place from which a killed save moved it away."""
    folder = tmp_path / "saved"
    write(folder, "old")
    kill_while_saving(folder, "moved away")
    folder.mkdir()
    (folder / "file").write_text("another")
    [hidden] = (path for path in tmp_path.iterdir() if path != folder)
    for action in (clean_up, write):
        with pytest.raises(ValueError, match=rf"{hidden}/previous is the content of {folder} bef"):
            action(folder)
        assert read(hidden / "previous") == {"file": "old"}
        assert read(folder) == {"file": "another"}
    shutil.move(folder, tmp_path / "another")
    clean_up(folder)
    assert names(tmp_path) == ["another", "saved"]
    assert read(folder) == {"file": "old"}


@pytest.mark.parametrize(
    ("host", "boot", "cleaned"),
    [
        ("here", "now", True),
        ("here", "earlier", True),  # the machine was started again
        ("container", "now", True),  # each has a host's name of its own
        ("there", "earlier", False),
    ],
)
def test_only_what_locks_can_tell_about_is_cleaned_up(host, boot, cleaned, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    kill_while_saving(folder, "writing")
    [hidden] = tmp_path.iterdir()
    hidden.rename(tmp_path / f".saved.saving-{host}-{boot}")
    monkeypatch.setattr(staging, "_host", lambda: "here")
    monkeypatch.setattr(staging, "_boot", lambda: "now")
    clean_up(folder)
    assert len(names(tmp_path)) == (0 if cleaned else 1)
    write(folder)
    assert len(names(tmp_path)) == (1 if cleaned else 2)


def test_a_machine_has_a_name(monkeypatch):
    assert staging._host()
    assert "/" not in staging._host() + staging._boot()
    monkeypatch.setattr(staging, "BOOT_FILE", Path("/nowhere"))
    assert staging._boot() == staging._host()


def test_other_people_s_hidden_folders_are_left_alone(tmp_path):
    machine = f"{staging._host()}-{staging._boot()}"
    mine = [f".saved.saving-{machine}", f".saved2.saving-{machine}", f".s.saving-{machine}"]
    for name in mine:
        (tmp_path / name / "new").mkdir(parents=True)
        (tmp_path / name / "precious").write_text("mine")
    for name in ("sa*", "[s]aved", "saved"):
        clean_up(tmp_path / name)
    assert names(tmp_path) == sorted(mine)
    assert all((tmp_path / name / "precious").exists() for name in mine)


def test_without_locks_nothing_is_deleted(before, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    kill_while_saving(folder, "writing")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    [hidden] = tmp_path.glob(".saved*")
    clean_up(folder)
    with pytest.raises(ValueError, match=rf"{hidden} exists: either another process saves a mo"):
        write(folder)
    assert read(hidden / "new") == {"file": "new"}
    shutil.rmtree(hidden)
    require_before(tmp_path, before)
    write(folder)
    require_before(tmp_path, {"file": "new"})


def test_a_lock_that_another_process_has_deleted_is_none(tmp_path, monkeypatch):
    """The other one ends between this one's opening of the file and its locking it."""
    folder, lock = tmp_path / "saved", staging.try_to_lock
    hidden = tmp_path / f".saved.saving-{staging._host()}-{staging._boot()}"
    deleted = []

    def lock_late(file):
        if not deleted:
            deleted.append(hidden)
            shutil.rmtree(hidden)
        return lock(file)

    monkeypatch.setattr(staging, "try_to_lock", lock_late)
    with staged(folder) as new:
        assert deleted
        (new / "file").write_text("new")
        with pytest.raises(ValueError, match="another process is saving"):
            write(folder)
    assert read(folder) == {"file": "new"}


def test_cleaning_up_does_not_take_a_deleted_lock_for_a_new_one(tmp_path, monkeypatch):
    """One save ends and the next begins between the opening of the file and its locking."""
    folder, lock = tmp_path / "saved", staging.try_to_lock
    first, second = staged(folder), staged(folder)
    first.__enter__()
    news = []

    def lock_late(file):
        monkeypatch.undo()
        first.__exit__(None, None, None)
        news.append(second.__enter__())
        return lock(file)

    monkeypatch.setattr(staging, "try_to_lock", lock_late)
    clean_up(folder)
    (news[0] / "file").write_text("second")
    second.__exit__(None, None, None)
    assert read(folder) == {"file": "second"}
    assert names(tmp_path) == ["saved"]
