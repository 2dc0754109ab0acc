"""Wrong input of the benchmarks: one line that names it, nothing on stdout, exit code 2."""

from __future__ import annotations

import pytest

from ftar_core.bench.__main__ import BENCHES, main


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("allreduce", "--sizes", "1Q"), "'1Q': a size such as 64K"),
        (("allreduce", "--sizes", "6"), "multiple of 4"),
        (("allreduce", "--sizes", "8G"), "from 4 B to 1 GiB"),
        (("allreduce", "--ranks", "1"), "from 2 to 64 ranks"),
        (("allreduce", "--ranks", "two"), "numbers such as 2,4"),
        (("allreduce", "--seconds", "0"), "--seconds"),
        (("alreduce",), "no such benchmark"),
        (("p2p", "--sizes", "big"), "'big': a size such as 64K"),
        (("p2p", "--sizes", "2G"), "from 1 B to 1 GiB"),
        (("p2p", "--latency", "x"), "'x': a size"),
        (("p2p", "--in-flight", "33"), "--in-flight"),
        (("p2p", "--seconds", "-1"), "--seconds"),
        (("p2p", "--rounds", "0"), "--rounds"),
        (("failover", "--faults", "carrier,cosmic"), "'cosmic'; there are none, carrier"),
        (("failover", "--count", "0"), "--count"),
        (("failover", "--svg", "/nowhere/at/all.svg"), "no directory /nowhere/at"),
        (("stripe", "--rates", "1000"), "'1000': two to four rates"),
        (("stripe", "--rates", "1000+fast"), "'1000+fast'"),
        (("stripe", "--rates", "1+1"), "10 to 100000"),
        (("stripe", "--modes", "bond"), "'bond'; there are socket, backup, stripe"),
        (("stripe", "--size", "1M,2M"), "one size"),
        (("stripe", "--seconds", "0"), "--seconds"),
        (("stripe", "--rounds", "0"), "--rounds"),
        (("overhead", "--models", "llama"), "'llama'; there are example, 26MB, 101MB"),
        (("overhead", "--rounds", "0"), "--rounds: from 1"),
        (("recovery", "--against", "torchft,horovod"), "'horovod'; there are torchft, torchft-tuned, restart"),
        (("recovery", "--systems", "gloo"), "'gloo'; there are ftar, ftar+spare, torchft"),
        (("recovery", "--faults", "fire"), "'fire'; there are sigkill, sigstop, node-loss"),
        (("recovery", "--count", "-1"), "--count -1: from 0 to 100000"),
        (("recovery", "--pace", "nan"), "--pace nan"),
        (("recovery", "--replicas", "1"), "--replicas 1: from 2 to 16"),
        (("recovery", "--from", "/nowhere"), "no such directory"),
        (("recovery", "--svg", "/nowhere/at/all.svg"), "no directory /nowhere/at"),
    ],
)
def test_wrong_input_is_named(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_help_names_the_defaults(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main((name, "--help"))
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "how to print (default: table)" in out
    assert out.count("(default: ") >= 4
    assert "None" not in out


def test_an_interrupt_while_a_benchmark_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ftar_core.bench.__main__.import_module", interrupted)
    assert main(("p2p",)) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
