"""The faults of GPUs, as data; like the others they are in SPECS (faultspecs.py). Standard library only."""

from __future__ import annotations

from agents.api.faultspec import Param, Spec

MAX_XID = 999
# Of agents/host/simgpus.py, THROTTLE; a test holds the two together.
THROTTLE_REASONS = ("hardware thermal", "software thermal", "hardware slowdown", "power brake", "power cap")
# What may be made to hang: functions of NVML that every look at the GPUs calls.
NVML_CALLS = ("nvmlDeviceGetTemperature", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2")

_GPU = Param("gpu", "int", "Which GPU, by its number in nvidia-smi", default=0, minimum=0, maximum=1023)

GPU_FAULTS = (
    Spec(
        "gpu-xid",
        "Report an Xid of a GPU, as its driver would. Simulated GPUs raise it in their driver, and fall off the bus"
        " with 79; of real ones it is an event inside this agent only, unless --kmsg is given",
        "gpu",
        (
            Param("xid", "int", "Its code", minimum=1, maximum=MAX_XID),
            _GPU,
            Param(
                "kmsg", "bool", "Of a real GPU, also write the driver's line, marked, to the kernel log", default=False
            ),
            Param(
                "expect_remediation",
                "bool",
                "With --kmsg: other health daemons of the node will drain or reboot it, and that is meant",
                default=False,
            ),
        ),
    ),
    Spec("gpu-lost", "Let a simulated GPU answer no call any more, as one that fell off the bus would", "gpu", (_GPU,)),
    Spec(
        "gpu-ecc",
        "Let a simulated GPU count memory errors, as a bad memory cell would",
        "gpu",
        (
            _GPU,
            Param("uncorrected", "int", "Errors that could not be corrected", default=1, minimum=0, maximum=1_000_000),
            Param("corrected", "int", "Errors that were corrected", default=0, minimum=0, maximum=1_000_000),
        ),
    ),
    Spec(
        "gpu-row-remap",
        "Let a simulated GPU replace a row of its memory, at its next reset, or fail to",
        "gpu",
        (_GPU, Param("outcome", "str", "What became of it", default="pending", choices=("pending", "failure"))),
    ),
    Spec(
        "gpu-throttle",
        "Slow a GPU down, as heat or a weak power supply would: a simulated one says why and at which clock it runs; of"
        " a real one the power limit is lowered",
        "gpu",
        (
            _GPU,
            Param(
                "cause",
                "str",
                "What its driver gives as the reason",
                default="hardware thermal",
                choices=THROTTLE_REASONS,
            ),
            Param("clock_mhz", "int", "The clock that is left of a simulated one", "mhz", 600, 1, 10_000),
            Param("power_percent", "float", "Part of a real one's power limit that is left", "percent", 60.0, 1, 99),
        ),
    ),
    Spec(
        "gpu-hang",
        "Stop the processes that compute on a GPU (SIGSTOP), as a kernel that never ends would",
        "gpu",
        (_GPU,),
        takes_out=True,
    ),
    Spec(
        "gpu-mem-hog",
        "Let a simulated GPU's memory be taken by somebody else, as a process that was left behind would",
        "gpu",
        (_GPU, Param("percent", "float", "How much of it is taken then", "percent", 98.0, 1, 100)),
    ),
    Spec(
        "gpu-busy",
        "Let a simulated GPU compute for somebody else, as a second job on it would",
        "gpu",
        (_GPU, Param("percent", "int", "Its utilization then", "percent", 100, 0, 100)),
    ),
    Spec(
        "nvlink-error",
        "Let an NVLink of a simulated GPU count errors, and go down",
        "gpu",
        (
            _GPU,
            Param("link", "int", "Which of its links", default=0, minimum=0, maximum=17),
            Param("errors", "int", "How many", default=1, minimum=1, maximum=1_000_000),
            Param("down", "bool", "The link is down as well", default=True),
        ),
    ),
    Spec(
        "nvml-hang",
        "Let a call of the simulated driver's library hang, as a driver in trouble would",
        "gpu",
        (Param("call", "str", "Which one", default=NVML_CALLS[0], choices=NVML_CALLS),),
    ),
)
