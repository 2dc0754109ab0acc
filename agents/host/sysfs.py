"""Files under /sys, read through a root that is a setting, so that trees saved from real machines can be test data."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 64 * 1024  # a sysfs attribute is at most a page; this bounds whatever lies under a test's root


class Sysfs:
    def __init__(self, root: Path = Path("/sys")) -> None:
        self.root = root
        self._prefix = f"{root}/"

    def text(self, path: str) -> str | None:
        """The attribute's text without surrounding blanks; None if it is not there or has no value now (EINVAL)."""
        try:
            handle = os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC)  # hundreds a second: no objects around it
        except OSError:
            return None
        try:
            return os.read(handle, MAX_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return None
        finally:
            os.close(handle)

    def number(self, path: str) -> int | None:
        text = self.text(path)
        try:
            return int(text, 0) if text else None
        except ValueError:
            return None

    def virtual_functions(self, nic: str) -> int:
        """How many SR-IOV virtual functions hang on this NIC (sysfs sriov_numvfs); 0 for NICs without them."""
        return self.number(f"class/net/{nic}/device/sriov_numvfs") or 0

    def rdma_devices(self, nic: str) -> tuple[str, ...]:
        """RDMA devices on this NIC's hardware that have an active port (sysfs-class-infiniband); their traffic passes
        the kernel by."""
        try:
            names = sorted(path.name for path in (self.root / f"class/net/{nic}/device/infiniband").iterdir())
        except OSError:
            return ()
        return tuple(name for name in names if self._active(name))

    def _active(self, device: str) -> bool:
        try:
            ports = sorted((self.root / f"class/infiniband/{device}/ports").iterdir())
        except OSError:
            return False
        # 4: ACTIVE
        return any((self.text(f"class/infiniband/{device}/ports/{p.name}/state") or "").startswith("4:") for p in ports)

    def shows(self, nic: str, index: int) -> bool:
        """True if this sysfs is of our network namespace, as far as `nic` tells."""
        return self.number(f"class/net/{nic}/ifindex") == index
