"""Options, addresses, files and certificates of a lab, before anything is made of them."""

from __future__ import annotations

import ssl
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from ftctl.commands.lab import _what_runs
from ftctl.errors import UsageProblem
from ftctl.exit_codes import ExitCode
from ftctl.lab import configure, credentials, paths, teardown
from ftctl.lab.keeper import FIRST_DELAY_S, HEALTHY_S, LONGEST_DELAY_S, next_delay
from ftctl.lab.layout import LabOptions, check, nodes, rate_bits
from ftctl.lab.manifest import Manifest, ManifestError, load_manifest, save
from ftctl.lab.paths import LabPaths


def test_addresses_follow_from_the_numbers_of_node_and_rail() -> None:
    third = nodes(LabOptions(replicas=3, rails=2))[2]
    assert (third.name, third.replica, third.management.address) == ("node2", "r2", "10.99.0.3")
    assert [(rail.name, rail.address, rail.address6) for rail in third.rails] == [
        ("rail0", "10.99.1.3", "fd99:0:0:1::3"),
        ("rail1", "10.99.2.3", "fd99:0:0:2::3"),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (LabOptions(replicas=0), "--replicas 0"),
        (LabOptions(replicas=65), "--replicas 65"),
        (LabOptions(rails=0), "--rails 0"),
        (LabOptions(ranks=0), "--ranks 0"),
        (LabOptions(nodes_per_replica=2), "1 rank of a replica cannot be spread evenly"),
        (LabOptions(nodes_per_replica=2, ranks=3), "3 ranks of a replica cannot be spread evenly"),
        (LabOptions(nodes_per_replica=2, ranks=2, replicas=33), "--replicas 33: not in 1 to 32"),
        (LabOptions(nodes_per_replica=2, ranks=2, job="nccl"), "with --job nccl there are no replicas"),
        (LabOptions(min_replicas=4), "--min-replicas 4"),
        (LabOptions(spares=-1), "--spares -1"),
        (LabOptions(spares=62), "--spares 62"),
        (LabOptions(spares=1, job="nccl"), "--spares 1"),
        (LabOptions(checkpoint_every="0"), "--checkpoint-every 0: neither steps nor a time"),
        (LabOptions(checkpoint_every="10 apples"), "--checkpoint-every 10 apples"),
        (LabOptions(checkpoint_every="50", job="nccl"), "nothing is trained"),
        (LabOptions(step_ms=-1), "--step-ms -1"),
        (LabOptions(seed=-1), "--seed -1"),
        (LabOptions(seed=10**26), "--seed 1000"),
        (LabOptions(name="../x"), "lab '../x'"),
        (LabOptions(name="a" * 33), "cannot be a lab's name"),
        (LabOptions(name="lab_1"), "cannot be a lab's name"),
        (LabOptions(rate="fast"), "--rate fast"),
        (LabOptions(rate="1kbit"), "--rate 1kbit"),
    ],
)
def test_options_that_cannot_be_built_are_refused_with_what_to_give(options: LabOptions, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        check(options)
    assert says in str(caught.value)
    assert caught.value.hint
    assert caught.value.code is ExitCode.USAGE


def test_rates() -> None:
    assert (rate_bits("1gbit"), rate_bits("500mbit"), rate_bits("2000kbit")) == (10**9, 5 * 10**8, 2 * 10**6)


def test_a_process_that_dies_at_once_is_started_less_and_less_often() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(next_delay(delays[-1], ran_s=0.01))
    assert delays[1:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == LONGEST_DELAY_S
    assert next_delay(LONGEST_DELAY_S, HEALTHY_S) == FIRST_DELAY_S


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[LabPaths, Manifest, credentials.Credentials]]:
    """A lab's files, without a lab. Sockets have short names; pytest's directories may be deep."""
    with tempfile.TemporaryDirectory(prefix="ftctl-test-") as sockets:
        yield _lab_in(tmp_path, Path(sockets))


def _lab_in(tmp_path: Path, sockets: Path) -> tuple[LabPaths, Manifest, credentials.Credentials]:
    place = LabPaths(tmp_path / "lab")
    options = LabOptions(replicas=2)
    manifest = Manifest(uuid="0123abcd-x", runtime_dir=str(sockets / "ftctl-0-0123abcd"), options=options, created=0)
    place.root.mkdir(mode=0o700)
    made = credentials.make(place, nodes(options))
    configure.write_all(
        place, manifest, nodes(options), made, configure.process_list(place, manifest, nodes(options), made)
    )
    return place, manifest, made


def test_secrets_are_readable_by_their_owner_only_and_stand_in_no_command_line(
    lab: tuple[LabPaths, Manifest, credentials.Credentials],
) -> None:
    place, manifest, made = lab
    secret_files = [*place.tokens.iterdir(), *place.tls.iterdir()]
    assert len(secret_files) == 6 + 5
    for path in secret_files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    secrets = [path.read_text().strip() for path in place.tokens.iterdir() if path.suffix != ".yaml"]
    assert len(set(secrets)) == 5
    commands = " ".join(
        word for spec in configure.process_list(place, manifest, nodes(manifest.options), made) for word in spec.argv
    )
    assert not any(secret in commands for secret in secrets)


def test_certificates_are_of_the_labs_own_authority_and_name_the_node(
    lab: tuple[LabPaths, Manifest, credentials.Credentials],
) -> None:
    _place, _manifest, made = lab
    authority = x509.load_pem_x509_certificate(made.ca.read_bytes())
    for name, (certificate_file, key_file) in made.certificates.items():
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name]
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate_file, key_file)  # raises if the key is another's


def test_agents_can_read_their_configuration(lab: tuple[LabPaths, Manifest, credentials.Credentials]) -> None:
    from agents.settings import load

    place, _manifest, _made = lab
    settings = load(place.node("node1") / "agent.yaml")
    assert settings.rails == ["rail0", "rail1"]
    assert settings.management_nic == "mgmt0"
    replica = settings.supervision.replicas[0]
    assert replica.env["FTAR_RAILS"] == "rail0=10.99.1.2@rail0,rail1=10.99.2.2@rail1"
    assert replica.env["FTAR_REPLICA"] == "r1"


def test_the_coordinator_can_read_its_command_line(lab: tuple[LabPaths, Manifest, credentials.Credentials]) -> None:
    from ftar_core.coordinator.options import build_parser

    place, manifest, made = lab
    spec = configure.process_list(place, manifest, nodes(manifest.options), made)[0]
    parsed = build_parser().parse_args(list(spec.argv[3:]))
    assert (parsed.replicas, parsed.min_replicas, parsed.profile) == (2, 1, "lab")


def test_a_lab_that_runs_nccl_has_ranks_and_no_coordinator(
    lab: tuple[LabPaths, Manifest, credentials.Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftar_core.ncclrun.__main__ import _arguments, read_place

    place, manifest, made = lab
    monkeypatch.setenv("FTAR_NET_OPTIONS", "heartbeat_ms=20")
    options = msgspec.structs.replace(manifest.options, job="nccl", steps=9)
    changed = msgspec.structs.replace(manifest, options=options)
    node = nodes(options)[1]
    config = configure.agent_config(place, changed, node, made, node)
    assert "coordinator" not in config
    assert "supervision" not in config
    specs = configure.process_list(place, changed, nodes(options), made)
    assert [spec.name for spec in specs] == ["agent-node0", "agent-node1", "rank-node0", "rank-node1"]
    parsed = _arguments(list(specs[3].argv[3:]))
    assert parsed.rails == "rail0=10.99.1.2@rail0,rail1=10.99.2.2@rail1"
    assert (parsed.rounds, parsed.round_ms) == (9, options.step_ms)
    assert (read_place(specs[3].env).rank, read_place(specs[3].env).address) == (1, "10.99.0.1")
    assert specs[3].env["FTAR_NET_OPTIONS"] == "hold_down_ms=3000,heartbeat_ms=20"
    # What came from the shell is said, since nobody looks there for the reason of a lab that behaves otherwise.
    told = _what_runs(options, configure.wished_net_options())
    assert told.endswith("run the NCCL plugin, 2 rails each, with the FTAR_NET_OPTIONS of this shell (heartbeat_ms=20)")
    assert "FTAR_NET_OPTIONS" not in _what_runs(options, "") + _what_runs(manifest.options, "heartbeat_ms=20")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LabOptions(job="sleep"), "--job sleep: not one of training, nccl"),
        (LabOptions(job="nccl", replicas=1), "--replicas 1: not in 2 to 64"),
    ],
)
def test_a_job_that_cannot_be_is_refused(options: LabOptions, words: str) -> None:
    with pytest.raises(UsageProblem, match=words):
        check(options)


def test_a_damaged_manifest_is_said_and_nothing_is_removed(tmp_path: Path) -> None:
    place = LabPaths(tmp_path)
    place.manifest.write_text('{"uuid": "x", "surprise": 1}')
    with pytest.raises(ManifestError, match=r"lab\.json is damaged"):
        teardown.take_down(place)
    assert place.manifest.exists()


def test_only_a_sockets_directory_of_ours_is_removed(tmp_path: Path) -> None:
    """A manifest that names somebody else's directory cannot make `lab down` remove it."""
    foreign = tmp_path / "precious"
    foreign.mkdir()
    link = tmp_path / "ftctl-0-0123abcd"
    link.symlink_to(foreign)
    for runtime in (foreign, link):
        place = LabPaths(tmp_path / "lab")
        place.root.mkdir()
        save(place.manifest, Manifest(uuid="none-such", runtime_dir=str(runtime), options=LabOptions(), created=0))
        assert load_manifest(place.manifest).runtime_dir == str(runtime)
        assert teardown.take_down(place).lines() == []
        assert foreign.is_dir()
        assert not place.root.exists()


def test_a_half_made_lab_without_a_manifest_is_removed(tmp_path: Path) -> None:
    place = LabPaths(tmp_path / "lab")
    place.tokens.mkdir(parents=True)
    assert teardown.take_down(place).lines() == []
    assert not place.root.exists()


def test_a_state_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "labs").symlink_to(tmp_path / "real")
    with pytest.raises(paths.UnsafeDirectory):
        paths.ensure_private(tmp_path / "labs")
