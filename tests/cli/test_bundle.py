"""`ftctl bundle`: one archive that an incident report can be written from, and in which no secret is."""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.api import models as m
from ftctl.bundling import Bundle, opened, without_secrets

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import event
from .fake_server import TOKEN


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.partition("/")[2]] = file.read()
        return found


def manifest(files: dict[str, bytes]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files["manifest.json"])
    return loaded


def test_everything_that_was_read_is_there_with_its_digest_and_the_rest_is_named(
    ftctl: Run, cluster: FakeCluster, folder: Path
) -> None:
    cluster["node1"].metrics = "ftctl_problems 0.0\n"
    wish = m.InjectRequest(kind="link-down", nic="rail0", reason="a drill")
    cluster["node1"].faults = [cluster["node1"].fault("node1/rail0", wish)]
    cluster["node1"].events = [
        event(1, "node1", "rail.down", "node1/rail0", "long ago", time=time.time() - 7200),
        event(2, "node1", "rail.down", "node1/rail0", "just now", time=time.time() - 60),
    ]
    done = ftctl("bundle", "-o", "incident.tar.gz")
    assert done.code == 0, done.err
    assert done.out.strip() == str(folder / "incident.tar.gz")
    files = unpacked(folder / "incident.tar.gz")
    about = manifest(files)
    assert {one["name"]: one["sha256"] for one in about["files"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != "manifest.json"
    }
    assert json.loads(files["status.json"])["job"]["name"] == "main"
    assert json.loads(files["job.json"])["settings"] == {"evict_after_s": 2.0}
    assert [json.loads(line)["reason"] for line in files["events.jsonl"].splitlines()] == ["just now"]
    assert json.loads(files["nodes/node1/faults.json"])["faults"][0]["reason"] == "a drill"
    assert files["nodes/node1/metrics.txt"] == b"ftctl_problems 0.0\n"
    assert json.loads(files["versions.json"])["agents"]["node2"] == "0.1.0"
    assert json.loads(files["inventory.json"])["nodes"][1]["name"] == "node1"
    missing = {one["what"]: one["reason"] for one in about["missing"]}
    assert missing["nodes/node1/health.json"] == "this agent has no such route"
    assert "do not serve log files" in missing["logs"]
    assert (folder / "incident.tar.gz").stat().st_mode & 0o077 == 0
    again = ftctl("bundle", "-o", "incident.tar.gz")
    assert again.code == 2
    assert "not overwritten" in again.err
    assert sorted(path.name for path in folder.iterdir() if "part" in path.name) == []


def test_no_secret_is_in_it_wherever_it_stood(ftctl: Run, cluster: FakeCluster, folder: Path) -> None:
    leak = f"curl -H 'Authorization: Bearer {TOKEN}' failed; password=hunter2hunter2"
    cluster["node1"].events = [event(1, "node1", "x.y", "node1", leak, time=4e9)]
    cluster["node1"].problems = [m.ProblemView(object="node1", reason=leak)]
    cluster["node1"].metrics = f'x{{token="{TOKEN}"}} 1\n'
    assert cluster.job is not None
    cluster.job.reason = f"-----BEGIN RSA PRIVATE KEY-----\nMIIabc{TOKEN}\n-----END RSA PRIVATE KEY-----"
    cluster["node2"].mode = "junk"
    ftctl("bundle", "-o", "b.tar.gz")
    for name, data in unpacked(folder / "b.tar.gz").items():
        for secret in (TOKEN, "hunter2", "MIIabc"):
            assert secret.encode() not in data, name
    files = unpacked(folder / "b.tar.gz")
    assert b"tokens_per_s" in files["status.json"], "what only sounds like one stays"
    assert json.loads(files["status.json"])["job"]["reason"] == "[left out]"
    counted = {one["name"]: one["left_out"] for one in manifest(files)["files"]}
    assert counted["events.jsonl"] == 2
    assert counted["inventory.json"] == 0


def test_who_does_not_answer_is_named_and_the_archive_is_there(ftctl: Run, cluster: FakeCluster, folder: Path) -> None:
    cluster["node2"].stop()
    cluster.job = None
    done = ftctl("bundle", "--file", "b.tar.gz")
    assert done.code == 6
    files = unpacked(folder / "b.tar.gz")
    missing = {one["what"]: one["reason"] for one in manifest(files)["missing"]}
    assert "agent of node2" in missing["nodes/node2"]
    assert "nobody listens on 10.0.0.1:7600" in missing["job.json"]
    assert "nodes/node1/faults.json" in files
    assert not any(name.startswith("nodes/node2/") for name in files)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--since", "yesterday"), 2, "not a duration"),
        (("-o", "no/such/directory/b.tar.gz"), 1, "nothing was written"),
    ],
)
def test_bad_input_leaves_no_file(
    ftctl: Run, cluster: FakeCluster, folder: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    before = sorted(folder.iterdir())
    wrong = ftctl("bundle", *words)
    assert (wrong.code, wrong.out) == (code, "")
    assert said in wrong.err
    assert sorted(folder.iterdir()) == before


def test_it_is_bounded_and_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"

    def filled(bundle: Bundle) -> None:
        bundle.add("status.json", "all", "x" * 600)
        bundle.add("big.json", "all", "y" * 600)
        bundle.add("small.json", "all", "z" * 100)

    with opened(path, "root", secrets=[], now=0.0, limit=1000) as bundle:
        filled(bundle)
        bundle.finish({})
    files = unpacked(path)
    assert set(files) == {"status.json", "small.json", "manifest.json"}
    assert manifest(files)["missing"][0]["reason"] == "600 bytes; the bundle has room for 400 more"
    path.unlink()

    def interrupted() -> None:
        with opened(path, "root", secrets=[], now=0.0) as bundle:
            filled(bundle)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@given(st.text(), st.text(alphabet="abcdefghijklmnop0123456789+/=", min_size=16, max_size=44), st.text())
def test_a_known_secret_is_found_in_any_text(before: str, secret: str, after: str) -> None:
    clean, count = without_secrets(f"{before}{secret}{after}", [secret])
    assert secret not in clean
    assert count


def test_what_says_that_it_is_a_secret_is_taken_for_one() -> None:
    for text, clean in (
        ('{"token": "abcdefgh"}', '{"token": "[left out]"}'),
        ("operator_token: abcdefgh", "operator_token: [left out]"),
        ("FTAR_API_KEY=abcdefgh x", "FTAR_API_KEY=[left out] x"),
        ("authorization: Bearer abcdefgh", "authorization: Bearer [left out]"),
        ("Bearer abcdefghij", "Bearer [left out]"),
        ('{"tokens_per_s": 123456.0}', '{"tokens_per_s": 123456.0}'),
        ("token_file: ~/.config/token", "token_file: ~/.config/token"),
        ("the token is not known here", "the token is not known here"),
    ):
        assert without_secrets(text, [])[0] == clean
        assert without_secrets(clean, [])[0] == clean
