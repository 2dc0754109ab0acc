"""An engineer exports FTAR_* by hand and gets it wrong in every way there is: one clear line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftar_core.errors import SettingsError
from ftar_core.runtime.rails import Rail, interfaces, parse_rails
from ftar_core.runtime.settings import read_settings
from ftar_core.wire.address import Address, parse_address
from ftar_core.wire.tokens import read_token

MACHINE = {
    "lo": ["127.0.0.1", "::1"],
    "rail0": ["10.1.0.3", "fd00::3"],
    "rail1": ["10.2.0.3"],
    "v6only": ["fd01::3"],
    "bare": [],
    "twin": ["10.2.0.3"],
    "enP2p1": ["10.3.0.3"],
}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a secret of the job, long enough\n")
    return {
        "FTAR_COORDINATOR": "10.0.0.1:7600",
        "FTAR_JOB": "demo",
        "FTAR_REPLICA": "r0",
        "FTAR_TOKEN_FILE": str(token),
    }


def look() -> dict[str, list[str]]:
    return MACHINE


def test_four_variables_are_enough(env: dict[str, str]) -> None:
    settings = read_settings(env, look)
    assert settings.coordinator == Address("10.0.0.1", 7600)
    assert (settings.job, settings.replica, settings.rank, settings.world_size) == ("demo", "r0", 0, 1)
    assert settings.token == b"a secret of the job, long enough"
    assert settings.rails == (Rail("lo", "", "127.0.0.1"),)
    assert settings.agent is None
    assert settings.journal is None
    assert settings.node
    assert settings.reduce == "host"
    assert "secret" not in repr(settings)


def test_everything_set(env: dict[str, str], tmp_path: Path) -> None:
    env |= {"FTAR_RAILS": "rail0,rail1=10.2.0.3@rail1", "FTAR_NODE": "node7", "FTAR_AGENT": "/run/ranks.sock"}
    env["FTAR_REDUCE"] = "device"
    env |= {
        "FTAR_JOURNAL": str(tmp_path),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "FTAR_COORDINATOR": "[::1]:1",
    }
    settings = read_settings(env, look)
    assert settings.coordinator == Address("::1", 1)
    assert settings.rails == (Rail("rail0", "rail0", "10.1.0.3"), Rail("rail1", "rail1", "10.2.0.3"))
    assert settings.node == "node7"
    assert settings.reduce == "device"
    assert settings.agent == Path("/run/ranks.sock")
    assert settings.journal == tmp_path
    assert settings.master is None


def test_one_rank_of_several(env: dict[str, str]) -> None:
    env |= {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "fd00::7", "MASTER_PORT": "29500"}
    settings = read_settings(env | {"FTAR_LEADER": "10.0.0.9:7700"}, look)
    assert (settings.rank, settings.world_size, settings.local_rank) == (3, 8, 1)
    assert settings.master == Address("fd00::7", 29500)
    assert settings.leader == Address("10.0.0.9", 7700)
    for variable, value in (("MASTER_PORT", "x"), ("FTAR_LEADER", "here"), ("RANK", "8")):
        with pytest.raises(SettingsError, match=variable):
            read_settings(env | {variable: value}, look)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FTAR_COORDINATOR", None, "not set"),
        ("FTAR_COORDINATOR", "", "not set"),
        ("FTAR_COORDINATOR", "host", "HOST:PORT"),
        ("FTAR_COORDINATOR", "host:http", "port"),
        ("FTAR_COORDINATOR", "host:0", "port"),
        ("FTAR_COORDINATOR", "host:70000", "port"),
        ("FTAR_COORDINATOR", ":7600", "host is missing"),
        ("FTAR_COORDINATOR", "::1:7600", "brackets"),
        ("FTAR_JOB", None, "not set"),
        ("FTAR_JOB", "My Job", "not a valid name"),
        ("FTAR_REPLICA", None, "not set"),
        ("FTAR_REPLICA", "r0/", "not a valid name"),
        ("FTAR_NODE", "node_", "not a valid name"),
        ("FTAR_TOKEN_FILE", None, "not set"),
        ("FTAR_TOKEN_FILE", "/nonexistent/token", "No such file"),
        ("FTAR_TOKEN_FILE", "/", "not a regular file"),
        ("FTAR_JOURNAL", "/nonexistent/journal", "no such directory"),
        ("FTAR_JOURNAL", "/dev/null", "not a directory"),
        ("FTAR_AGENT", "/" + "x" * 120, "107 bytes"),
        ("RANK", "one", "whole number"),
        ("RANK", "-1", "whole number"),
        ("RANK", "1", "highest rank is 0"),
        ("WORLD_SIZE", "0", "at least 1"),
        ("FTAR_RAIL", "rail0", "FTAR_RAILS is"),
        ("FTAR_MODE", "strip", "no such mode"),
        ("FTAR_REDUCE", "gpu", "no such place"),
        ("FTAR_CATCHUP_MBIT", "fast", "a rate in Mbit/s"),
        ("FTAR_CATCHUP_MBIT", "0", "a rate in Mbit/s"),
        ("FTAR_CATCHUP_MBIT", "nan", "a rate in Mbit/s"),
        ("FTAR_REPLAY_BUFFER", "8GB", "a size such as"),
        ("FTAR_REPLAY_BUFFER", "0", "a size such as"),
        ("FTAR_RAILS", "rail0,", "empty entry"),
        ("FTAR_RAILS", "rail7", "no network device 'rail7'"),
        ("FTAR_RAILS", "bare", "has no address"),
        ("FTAR_RAILS", "enP2p1", "no name for a rail"),
        ("FTAR_RAILS", "rail0,rail0=10.3.0.3", "named twice"),
        ("FTAR_RAILS", "a=10.1.0.3,b=10.1.0.3", "10.1.0.3"),
        ("FTAR_RAILS", "a=10.1.0.300", "no IPv4 or IPv6 address"),
        ("FTAR_RAILS", "a=10.9.9.9", "no device of this machine has"),
        ("FTAR_RAILS", "a=10.1.0.3@rail1", "does not have the address"),
        ("FTAR_RAILS", "a=10.1.0.3@nope", "no network device"),
        ("FTAR_RAILS", "a=10.2.0.3", "both have"),
        ("FTAR_RAILS", ",".join(f"a{n}=127.0.0.{n + 1}" for n in range(17)), "at most 16"),
    ],
)
def test_every_wrong_value_names_itself(env: dict[str, str], variable: str, value: str | None, reason: str) -> None:
    if value is None:
        del env[variable]
    else:
        env[variable] = value
    with pytest.raises(SettingsError, match=r"(?s).*") as caught:
        read_settings(env, look)
    assert variable.removesuffix("S") in str(caught.value)
    assert reason in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_other_programs_variables_are_theirs(env: dict[str, str]) -> None:
    env["FTAR_MY_OWN_THING"] = "1"
    assert read_settings(env, look).job == "demo"


def test_rails_by_address_find_their_device() -> None:
    assert parse_rails("a=10.1.0.3", look) == (Rail("a", "rail0", "10.1.0.3"),)
    assert parse_rails("a=fd00:0:0::3", look) == (Rail("a", "rail0", "fd00::3"),)
    assert parse_rails("a=[fd00::3]@rail0", look) == (Rail("a", "rail0", "fd00::3"),)
    assert parse_rails("v6only", look) == (Rail("v6only", "v6only", "fd01::3"),)
    assert parse_rails("x=127.0.0.9, y=127.0.0.10@lo", look) == (
        Rail("x", "", "127.0.0.9"),
        Rail("y", "", "127.0.0.10"),
    )
    assert parse_rails("fast=10.3.0.3@enP2p1", look) == (Rail("fast", "enP2p1", "10.3.0.3"),)


def test_this_machine_has_a_loopback_device() -> None:
    assert "127.0.0.1" in interfaces()["lo"]
    assert parse_rails("lo") == (Rail("lo", "", "127.0.0.1"),)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="other users") as caught:
        read_token(path)
    assert f"chmod 600 {path}" in caught.value.hint
    path.chmod(0o600)
    assert read_token(path) == b"0123456789abcdef"


@pytest.mark.parametrize(("content", "reason"), [(b"short\n", "at least 16"), (b"x" * 5000, "longer than")])
def test_a_token_of_the_wrong_length(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=reason):
        read_token(path)


def test_addresses_print_as_they_are_written() -> None:
    for text in ("10.0.0.1:7600", "[fd00::1]:7600", "node0:7600"):
        assert str(parse_address(text)) == text
    assert parse_address("127.0.0.1:0", any_port=True).port == 0
