"""Pickles that want something run: nothing is, and the global is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pickles as p
from tests.support.canary import ROOT, Outcome, read_safely
from tests.support.zips import write_state

WEIGHT = p.tensor(p.storage("0", 4), (4,), (1,))
STORAGES = {"0": bytes(16)}
COMMAND = p.text("touch streammerge-was-here")

_STDLIB = [
    "os.system", "posix.system", "nt.system", "os.popen", "os.execv", "subprocess.Popen", "subprocess.check_output",
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.open", "builtins.__import__", "builtins.print",
    "builtins.map", "builtins.setattr", "builtins.type", "__builtin__.eval", "__builtin__.execfile",
    "importlib.import_module", "operator.attrgetter", "operator.methodcaller", "functools.partial",
    "functools.reduce", "_codecs.register_error", "pickle.loads", "_pickle.loads", "pickle.Unpickler", "marshal.loads",
    "types.FunctionType", "types.CodeType", "ctypes.CDLL", "runpy.run_path", "timeit.timeit", "pty.spawn",
    "webbrowser.open", "socket.create_connection", "shutil.rmtree", "pydoc.locate", "cProfile.run", "bdb.Bdb.run",
    "code.InteractiveInterpreter", "copyreg.__newobj__", "copyreg.add_extension", "copy_reg.__newobj_ex__",
    "pathlib.Path.write_text", "collections.OrderedDict.update", "logging.config.listen", "weakref.finalize",
    "multiprocessing.util.spawnv_passfds", "_io.open", "io.FileIO", "zipimport.zipimporter", "sys.setrecursionlimit",
]  # fmt: skip
_SYSTEM = p.glob("os", "system")
_GETATTR = p.glob("builtins", "getattr")

_HIDDEN = {
    "NEWOBJ": _SYSTEM + p.tup(COMMAND) + b"\x81",
    "NEWOBJ_EX": _SYSTEM + p.tup(COMMAND) + b"}\x92",
    "OBJ": b"(" + _SYSTEM + COMMAND + b"o",
    "INST": b"(" + COMMAND + b"ios\nsystem\n",
    "STACK_GLOBAL": p.stack_glob("os", "system") + p.tup(COMMAND) + b"R",
    "through the memo": _SYSTEM + b"q\x05" + b"0" + b"h\x05" + p.tup(COMMAND) + b"R",
    "as a key": b"}" + p.call(_SYSTEM, COMMAND) + b"Ns",
    "in the state": p.newobj(p.glob("mine", "Thing")) + p.call(_SYSTEM, COMMAND) + b"b",
    "in the arguments": p.call(p.glob("torch._utils", "_rebuild_parameter"), p.call(_SYSTEM, COMMAND), b"\x89"),
    "in a storage": p.tup(p.text("storage"), p.call(_SYSTEM, COMMAND), p.text("0"), p.text("cpu"), b"K\x04") + b"Q",
    "in a set": b"\x8f(" + p.call(_SYSTEM, COMMAND) + b"\x90",
    "dropped": p.call(_SYSTEM, COMMAND) + b"0N",
    "in extra state": p.call(_SYSTEM, COMMAND),
}
_CHAINS = {
    "getattr os": p.call(_GETATTR, p.glob("os", "path"), p.text("system")),
    "getattr import": p.call(_GETATTR, p.call(_GETATTR, p.glob("torch", "os"), p.text("os")), p.text("system")),
    "getattr ShardedTensor": p.call(
        _GETATTR, p.glob("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), p.text("__globals__")
    ),
    "getattr of a value": p.call(_GETATTR, COMMAND, p.text("__class__")),
    "__builtin__ getattr": p.call(p.glob("__builtin__", "getattr"), p.glob("os", "path"), p.text("ProcessGroupState")),
}
_OPCODES = {
    "EXT1": b"\x82\x01", "EXT2": b"\x83\x01\x00", "EXT4": b"\x84\x01\x00\x00\x00", "PERSID": b"Pstorage\n",
    "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"N\x98", "unknown": b"\xff",
}  # fmt: skip
# Of other libraries: they stay inert, and the user is told.
_INERT = [
    "torch.hub.load", "torch.load", "torch.serialization.load", "torch.jit.load", "torch.ops.load_library",
    "torch._inductor.codecache.compile_file", "numpy.load", "numpy.testing._private.utils.runstring", "mine.system",
    "__main__.run", "os\n.system", "osx.system", "pip.main",
]  # fmt: skip


def _cases() -> dict[str, bytes]:
    found = {}
    for full in (*_STDLIB, *_INERT):
        module, _, name = full.rpartition(".")
        module, name = (full.split(".", 1)) if full == "pathlib.Path.write_text" else (module, name)
        found[full] = p.call(p.stack_glob(module, name), COMMAND)
    return {**found, **_HIDDEN, **_CHAINS, **_OPCODES}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("calls")
    folders = {}
    for number, (case, value) in enumerate(_cases().items()):
        entries = {"w": WEIGHT, "layer._extra_state" if case == "in extra state" else "note": value}
        folders[case] = write_state(root / str(number), entries, STORAGES)
    return read_safely(folders)


@pytest.mark.parametrize("case", _cases())
def test_nothing_runs(case: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case]
    assert not outcome.events
    assert outcome.expected, outcome.error
    assert outcome.seconds < 2
    assert not Path("streammerge-was-here").exists()


@pytest.mark.parametrize("case", _STDLIB)
def test_calls_into_the_standard_library_are_refused(case: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case]
    assert outcome.error == "UnsafeError"
    assert case.replace("__builtin__", "builtins").replace("copy_reg", "copyreg") in outcome.text
    assert "model_world_size_1_rank_0.pt" in outcome.text


@pytest.mark.parametrize("case", _HIDDEN)
def test_however_the_call_is_spelled(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].error == "UnsafeError"
    assert "os.system" in outcomes[case].text


@pytest.mark.parametrize("case", _CHAINS)
def test_getattr_has_one_honest_use(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].error == "UnsafeError"
    assert "getattr" in outcomes[case].text


@pytest.mark.parametrize("case", _OPCODES)
def test_opcodes_without_a_place_in_checkpoints(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].error in ("UnsafeError", "SourceError")


@pytest.mark.parametrize("case", _INERT)
def test_unknown_calls_stay_inert_and_are_named(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].error in ("", "UnsafeError", "UnsupportedError", "SourceError")
    assert case in outcomes[case].text


def test_the_canary_sings() -> None:
    """The watch that the tests above rely on does notice."""
    watched = (
        "from tests.support import canary; e = []; canary._watch(e); canary.os.system('true'); eval('1'); print(e)"
    )
    done = subprocess.run([sys.executable, "-c", watched], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "os.system" in done.stdout
    assert "exec" in done.stdout
