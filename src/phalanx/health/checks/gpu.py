# SPDX-License-Identifier: Apache-2.0
"""GPUs: driver, number, kind, modes, clocks, heat, memory errors and PCIe."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from phalanx.hardware import catalogue
from phalanx.hardware.provenance import installed
from phalanx.hardware.visible import is_unknown
from phalanx.health.check import Finding, Need, check, error, note, ok, size, skipped, warning
from phalanx.health.subject import Subject


@check(
    why="an upgrade of the driver without a restart, or a container without its libraries: no GPU is seen",
    cure="restart after an upgrade; start containers with --gpus all",
    threads=("NVIDIA/nvidia-container-toolkit/issues/171", "vllm-project/vllm/issues/4940"),
    symptoms=(r"NVML", r"no GPU", r"No CUDA", r"nvidia-smi", r"mismatch", r"'cuda'"),
)
def driver(subject: Subject) -> Finding:
    """NVML and the driver's version"""
    devices, host = subject.devices, subject.host
    nodes = sorted(host.path("/dev").glob("nvidia[0-9]*"))
    wanted = subject.options is not None and subject.options.device == "cuda"
    if not devices.failure and devices.present:
        return ok(f"driver {devices.driver}, {devices.present} GPUs", driver=devices.driver)
    if "mismatch" in devices.failure.lower():
        return error(
            f"the driver's kernel module and its library differ in version: {devices.failure}",
            "load the module of the installed version: restart the host",
            "reboot",
        )
    if devices.failure and not nodes:
        return error(f"NVML cannot be reached: {devices.failure}", "look into `nvidia-smi` and `dmesg`", "nvidia-smi")
    if nodes:
        denied = [node for node in nodes if not _readable(node)]
        if denied:
            return error(
                f"{denied[0].name} cannot be opened by this user",
                "give the container its GPUs, or the user its group",
                "docker run --gpus all ...",
            )
        cure = "install the driver's libraries in the container: the NVIDIA container toolkit mounts them"
        return error(
            f"{len(nodes)} GPUs are on this host, and NVML cannot be reached: {devices.failure}", cure, "docker run --gpus all ..."
        )
    if wanted:
        return error(
            "device='cuda', and this host has no GPU",
            "start the container with its GPUs, or use device='cpu'",
            "docker run --gpus all ...",
            "phalanx serve ... --device cpu",
        )
    return ok("no GPU on this host, and none is asked for")


@check(
    why="a GPU that is lost or waits for a reset is left out: the layout has one fewer, or does not fit",
    cure="reset or replace the GPU",
    threads=("https://docs.nvidia.com/deploy/xid-errors/index.html", "vllm-project/vllm/issues/30112"),
    symptoms=(r"cannot be used", r"GPUs? of one host", r"needs \d+ GPUs"),
    fine="every GPU that NVML lists answers",
)
def gpu_answers(subject: Subject) -> Iterator[Finding]:
    """whether each GPU that NVML lists answers"""
    for index, ailment in subject.devices.ailing.items():
        yield error(ailment.what, ailment.cure, f"nvidia-smi -i {index} -q", "dmesg | grep -i -e xid -e nvrm")


@check(
    why="CUDA reads past an entry that names no GPU here, and programs then run on the CPU",
    cure="name indices or UUIDs of `nvidia-smi -L`, or unset the variable",
    threads=("vllm-project/vllm/issues/7211", "vllm-project/vllm/issues/4940"),
    symptoms=(r"CUDA_VISIBLE_DEVICES", r"CUDA_DEVICE_ORDER", r"no GPU"),
)
def visible_devices(subject: Subject) -> Finding:
    """CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER against the GPUs of this host"""
    devices, environment = subject.devices, subject.host.environment
    names = [name for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in environment]
    unknown = next(filter(is_unknown, environment), None)
    if unknown is not None:
        return warning(f"{unknown} is no variable of CUDA and has no effect", "use CUDA_VISIBLE_DEVICES", f"unset {unknown}")
    if devices.failure or not devices.present or not names:
        return ok("neither is set" if not names else "NVML lists no GPU that they could name")
    if devices.refused and len(devices.ailing) < devices.present:
        return error(devices.unusable, "name indices or UUIDs of `nvidia-smi -L`", "nvidia-smi -L", f"unset {' '.join(names)}")
    if not devices.gpus and not devices.refused and (subject.options is None or subject.options.device != "cpu"):
        return note(devices.unusable, "unset the variable to use them", f"unset {names[0]}")
    return ok(f"{', '.join(f'{name}={environment[name]}' for name in names)} leaves {len(devices.gpus)} GPUs")


@check(
    why="CUDA numbers the fastest GPU first, and nvidia-smi by the bus: index 0 may be two cards",
    cure="number them by the bus: CUDA_DEVICE_ORDER=PCI_BUS_ID",
    threads=("https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html",),
    needs=(Need.PAIR,),
)
def device_order(subject: Subject) -> Finding:
    """the numbering of different GPUs"""
    kinds = {gpu.name for gpu in subject.devices.gpus}
    if len(kinds) > 1 and subject.host.environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return note(
            f"the GPUs differ ({', '.join(sorted(kinds))}): ranks are given their UUIDs, and other programs number them otherwise",
            "number them by the bus for all programs",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return ok("one kind of GPU, or one order for all programs")


@check(
    why="a laptop's or a cut-down board is slower than the board whose name it bears: the planner does not guess",
    cure="name a GPU of the catalogue, or measure this one: phalanx plan calibrate",
    threads=("vllm-project/vllm/issues/9157",),
    needs=(Need.GPU,),
    fine="the planner knows these GPUs",
)
def gpu_known(subject: Subject) -> Iterator[Finding]:
    """whether the planner has figures of the GPUs"""
    for name in sorted({gpu.name for gpu in subject.devices.gpus}):
        if catalogue.of_name(name) is None:
            yield note(
                f"{name} is not in the catalogue: `phalanx plan` and `--plan auto` cannot predict its speed",
                "name a GPU that it resembles, or measure this one",
                "phalanx plan calibrate",
            )


def _readable(node: object) -> bool:
    try:
        with open(str(node), "rb"):
            return True
    except PermissionError:
        return False
    except OSError:
        return True


TORCH_CUDA = re.compile(r"^cuda\b[^=]*= ['\"]([\d.]+)['\"]", re.MULTILINE)


@check(
    why="a driver of an older CUDA: error 803 or 804, 'forward compatibility was attempted'",
    cure="upgrade the driver, or install torch for its CUDA",
    threads=(
        "gpustack/gpustack/issues/4678",
        "llm-d/llm-d/issues/706",
        "vllm-project/vllm/issues/33447",
        "vllm-project/vllm/issues/4940",
    ),
    needs=(Need.GPU,),
    symptoms=(
        r"forward compatibility",
        r"\b80[34]\b",
        r"driver version is insufficient",
        r"unsupported toolchain",
        r"not compiled with CUDA",
        r"torch finds no GPU",
    ),
)
def driver_cuda(subject: Subject) -> Finding:
    """the driver's CUDA against torch's"""
    built = torch_cuda()
    if not built:
        gpus = len(subject.devices.gpus)
        reason = "torch is not installed" if built is None else f"torch {installed('torch')} is built without CUDA"
        return error(
            f"{reason}, and this host has {gpus} GPU{'s' * (gpus != 1)}",
            "install torch with CUDA",
            "pip install --force-reinstall torch",
        )
    if subject.devices.cuda is None:
        return skipped("NVML does not say which CUDA the driver supports")
    major, minor = divmod(subject.devices.cuda, 1000)
    supported = (major, minor // 10)
    wanted = tuple(int(part) for part in built.split(".")[:2])
    facts = {"driver": subject.devices.driver, "supports": ".".join(map(str, supported)), "torch": built}
    if wanted[0] > supported[0]:
        return error(
            f"torch is built for CUDA {built}, and driver {subject.devices.driver} supports CUDA {facts['supports']}",
            f"install a driver that supports CUDA {wanted[0]}, or torch for CUDA {supported[0]}",
            f"pip install torch --index-url .../cu{supported[0]}x",
            **facts,
        )
    return ok(f"torch is built for CUDA {built}, and the driver supports {facts['supports']}", **facts)


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, "" for a build without CUDA, None without torch. From its version file: importing
    torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = TORCH_CUDA.search((Path(spec.origin).parent / "version.py").read_text())
    return "" if match is None else match[1]


@check(
    why="CUDA_VISIBLE_DEVICES of another job, or a container that was given fewer GPUs",
    cure="match layout and GPUs",
    threads=("vllm-project/vllm/issues/7211",),
    needs=(Need.MODEL,),
    symptoms=(r"GPUs? of one host", r"invalid device ordinal", r"CUDA_VISIBLE_DEVICES"),
)
def gpu_count(subject: Subject) -> Finding:
    """visible GPUs against ranks"""
    options, devices = subject.options, subject.devices
    assert options is not None
    if options.device == "cpu" or not subject.on_gpu:
        return ok("the ranks run on CPU")
    if options.launcher == "ray":
        return skipped("Ray places the ranks: ray_cluster examines the GPUs of its hosts")
    visible, ranks = len(devices.gpus), subject.ranks_here
    if visible < ranks:
        variable = subject.host.environment.get("CUDA_VISIBLE_DEVICES")
        if variable is not None and devices.present >= ranks:
            summary = f"CUDA_VISIBLE_DEVICES={variable} leaves {visible} of {devices.present} GPUs, and {ranks} ranks need one each"
            return error(
                summary, "name as many as there are ranks", f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks)))}"
            )
        nodes = -(-options.world_size // max(visible, 1))
        return error(
            f"{visible} GPUs are visible, and {ranks} ranks need one each",
            "use a smaller layout, or more hosts",
            f"phalanx serve {options.model} --tp_size {max(visible, 1)}",
            f"phalanx serve {options.model} ... --num_workers {nodes}",
            visible=visible,
            ranks=ranks,
        )
    if visible > ranks and options.nnodes == 1:
        return note(f"{ranks} of {visible} GPUs are used by this layout; the others stay idle", "", visible=visible, ranks=ranks)
    return ok(f"{visible} GPUs for {ranks} ranks")


@check(
    why="tensor parallelism runs at the speed of the slowest GPU",
    cure="use GPUs of one kind",
    threads=("sgl-project/sglang/issues/4233", "vllm-project/vllm/issues/9157"),
    needs=(Need.PAIR,),
)
def gpu_mixed(subject: Subject) -> Finding:
    """names, memory and clocks of the GPUs of one layout"""
    gpus = subject.gpus_in_use
    if len(gpus) < 2:
        return ok("one GPU is used")
    kinds = sorted({gpu.name for gpu in gpus})
    memory = {gpu.index: gpu.total for gpu in gpus}
    if len(kinds) > 1:
        named = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in gpus)
        return warning(
            f"the ranks run on different GPUs: {named}",
            "use GPUs of one kind: every rank waits for the slowest, and has the memory of the smallest",
            f"export CUDA_VISIBLE_DEVICES={','.join(str(gpu.index) for gpu in gpus if gpu.name == gpus[0].name)}",
        )
    if max(memory.values()) - min(memory.values()) > max(memory.values()) // 50:
        named = ", ".join(f"GPU {index} {size(total)}" for index, total in memory.items())
        return warning(
            f"GPUs of one kind differ in memory: {named}",
            "look at MIG, ECC and the driver's reserve on each",
            "nvidia-smi -q -d MEMORY,ECC",
        )
    clocks = {gpu.index: gpu.max_sm_clock for gpu in gpus if gpu.max_sm_clock}
    if len(set(clocks.values())) > 1:
        named = ", ".join(f"GPU {index} {clock} MHz" for index, clock in clocks.items())
        return warning(
            f"GPUs of one kind differ in their highest clock: {named}", "set the same clocks on all", "nvidia-smi -q -d CLOCK"
        )
    return ok(f"{len(gpus)} x {kinds[0]}")


@check(
    why="an instance has no NVLink and no peer access: TP fails, or goes through host memory",
    cure="turn MIG off, or use one rank an instance",
    threads=("NVIDIA/nccl/issues/1716", "vllm-project/vllm/issues/7211"),
    needs=(Need.GPU,),
    symptoms=(r"MIG", r"invalid usage", r"invalid device ordinal"),
)
def mig(subject: Subject) -> Finding:
    """MIG mode"""
    cut = [gpu for gpu in subject.gpus_in_use if gpu.mig]
    if not cut:
        return ok("MIG is off, or not supported")
    several = subject.ranks_here > 1
    named = ", ".join(str(gpu.index) for gpu in cut)
    commands = [f"nvidia-smi -i {gpu.index} -mig 0" for gpu in cut]
    if several:
        return error(
            f"MIG is on for GPU {named}, and instances have no peer access: {subject.ranks_here} ranks cannot share tensors",
            "turn MIG off, or use one rank",
            *commands,
        )
    return note(
        f"MIG is on for GPU {named}: the ranks get a part of its multiprocessors and memory",
        "turn MIG off for the full GPU",
        *commands,
    )


COMPUTE_MODES = {1: "exclusive to one thread", 2: "closed to CUDA (prohibited)", 3: "exclusive to one process"}


@check(
    why="in an exclusive mode the second process gets 'all CUDA-capable devices are busy or unavailable'",
    cure="set the default mode",
    threads=("https://developer.nvidia.com/management-library-nvml", "vllm-project/vllm/issues/4940"),
    needs=(Need.GPU,),
    symptoms=(r"busy or unavailable", r"exclusive"),
    fine="GPUs admit several processes, or NVML does not say",
)
def compute_mode(subject: Subject) -> Iterator[Finding]:
    """the compute mode of each GPU"""
    for gpu in subject.gpus_in_use:
        mode = COMPUTE_MODES.get(gpu.compute_mode or 0)
        if mode is None:
            continue
        busy = bool(gpu.holders)
        command = f"nvidia-smi -i {gpu.index} -c DEFAULT"
        if gpu.compute_mode in (1, 2) or busy:
            yield error(f"GPU {gpu.index} is {mode}" + (", and a process has it" if busy else ""), "set the default mode", command)
        else:
            yield note(f"GPU {gpu.index} is {mode}: `phalanx doctor` and tuning need it alone", "set the default mode", command)


@check(
    why="without it the driver initializes the GPU at each first use, 5 to 20 s",
    cure="run nvidia-persistenced",
    threads=("https://docs.nvidia.com/deploy/driver-persistence/index.html",),
    needs=(Need.GPU,),
)
def persistence(subject: Subject) -> Finding:
    """persistence mode"""
    off = [str(gpu.index) for gpu in subject.devices.gpus if gpu.persistence is False]
    if off:
        return note(
            f"persistence mode is off for GPU {', '.join(off)}: the first program after an idle time waits seconds for the driver",
            "keep the driver loaded; on a virtual machine this may be the host's to decide",
            "systemctl enable --now nvidia-persistenced",
        )
    return ok("the driver stays loaded, or NVML does not say")


@check(
    why="a lowered limit makes steps 10 to 30 percent slower; the limit itself binds on H200 under load, which is normal",
    cure="restore the default limit",
    threads=("Azure/azurehpc/pull/595", "https://developer.nvidia.com/management-library-nvml"),
    needs=(Need.GPU,),
)
def power_limit(subject: Subject) -> list[Finding]:
    """the power limit of each GPU against its default"""
    findings = []
    known = [gpu for gpu in subject.devices.gpus if gpu.power_limit is not None]
    for gpu in known:
        if gpu.power_default is not None and gpu.power_limit is not None and gpu.power_limit < gpu.power_default - 1:
            findings.append(
                warning(
                    f"GPU {gpu.index} may draw {gpu.power_limit:.0f} W, and its default is {gpu.power_default:.0f} W: long prompts"
                    " get slower",
                    "restore the default, unless the machine's cooling or supply needs the lower limit",
                    f"nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}",
                    limit=gpu.power_limit,
                    default=gpu.power_default,
                )
            )
    limits = {gpu.power_limit for gpu in known}
    if not findings and len(limits) > 1 and len({gpu.name for gpu in known}) == 1:
        named = ", ".join(f"GPU {gpu.index} {gpu.power_limit:.0f} W" for gpu in known)
        findings.append(
            warning(f"GPUs of one kind have different power limits: {named}", "set the same limit on all", "nvidia-smi -q -d POWER")
        )
    reached = [gpu for gpu in known if gpu.reasons and "power_cap" in gpu.reasons]
    if reached and not findings:
        return [ok(f"GPU {', '.join(str(gpu.index) for gpu in reached)} runs at its power limit, which is normal under load")]
    return findings or [ok("power limits are the defaults")]


@check(
    why="clocks that were pinned for a benchmark or to save power stay until a restart",
    cure="restore the default clocks",
    threads=("https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",),
    needs=(Need.GPU,),
    fine="application clocks are the defaults, or NVML does not say",
)
def clocks(subject: Subject) -> Iterator[Finding]:
    """application clocks against their defaults"""
    for gpu in subject.devices.gpus:
        current, default = gpu.application_clock, gpu.default_application_clock
        if current is not None and default is not None and current < default:
            yield warning(
                f"GPU {gpu.index}: application clocks are set to {current} MHz, and their default is {default} MHz",
                "restore the default",
                f"nvidia-smi -i {gpu.index} -rac",
                current=current,
                default=default,
            )


@check(
    why="a GPU that is too hot, or whose supply fails, runs at a fraction of its clock, and all ranks with it",
    cure="mend cooling or supply",
    threads=("Azure/azurehpc/pull/595", "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"),
    needs=(Need.GPU,),
    fine="no GPU is slowed down by heat or by its supply",
)
def thermal(subject: Subject) -> Iterator[Finding]:
    """temperatures and the reasons for lower clocks"""
    for gpu in subject.devices.gpus:
        reasons = gpu.reasons or frozenset()
        hot = reasons & {"thermal", "hardware_thermal"}
        near = gpu.temperature is not None and gpu.slowdown_temperature is not None and gpu.temperature >= gpu.slowdown_temperature
        if hot or near:
            yield warning(
                f"GPU {gpu.index} is slowed down by heat: {gpu.temperature} degrees, {gpu.sm_clock} of {gpu.max_sm_clock} MHz",
                "look at fans, air flow and filters",
                f"nvidia-smi -i {gpu.index} -q -d TEMPERATURE,PERFORMANCE",
                temperature=gpu.temperature,
            )
        elif "power_brake" in reasons:
            yield warning(
                f"GPU {gpu.index} is slowed down by the power brake: the supply asks for less",
                "look at the power supplies of the machine",
                f"nvidia-smi -i {gpu.index} -q -d POWER,PERFORMANCE",
            )


@check(
    why="an uncorrected error ends the process that reads the row",
    cure="reset the GPU, or replace it",
    threads=("https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",),
    needs=(Need.GPU,),
    symptoms=(r"uncorrectable", r"ECC", r"\bXid\b"),
    fine="no uncorrected memory error, and no row waits to be remapped",
)
def ecc(subject: Subject) -> Iterator[Finding]:
    """uncorrected memory errors and remapped rows"""
    for gpu in subject.devices.gpus:
        if gpu.remap_failed:
            yield error(
                f"GPU {gpu.index}: remapping a row of its memory failed",
                "replace the GPU",
                f"nvidia-smi -i {gpu.index} -q -d ROW_REMAPPER",
            )
        elif gpu.remap_pending:
            yield error(
                f"GPU {gpu.index}: a row of its memory waits to be remapped",
                "reset the GPU, with no process on it",
                f"nvidia-smi -i {gpu.index} --gpu-reset",
            )
        if gpu.ecc_uncorrected:
            yield error(
                f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded",
                "reset the GPU; replace it where they return",
                f"nvidia-smi -i {gpu.index} --gpu-reset",
                count=gpu.ecc_uncorrected,
            )


XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
XID_MEANINGS = {
    13: "a kernel read or wrote a wrong address (the program's fault)",
    31: "a page fault of a kernel (the program's fault)",
    43: "the program ended with an error",
    45: "the program was ended",
    48: "an uncorrected memory error",
    63: "a row is to be remapped",
    64: "remapping a row failed",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    145: "an NVLink error",
    149: "an NVLink error",
}
OF_PROGRAMS = {13, 31, 43, 45}
"""A program's own faults: a healthy machine may have them."""


@check(
    why="a GPU that has fallen off the bus, or whose NVLink fails, hangs every rank",
    cure="reset or replace the GPU",
    threads=(
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
        "vllm-project/vllm/issues/30112",
        "marin-community/marin/issues/8934",
    ),
    needs=(Need.GPU,),
    symptoms=(r"\bXid\b", r"unspecified launch failure", r"illegal memory", r"CUDA error", r"hardware", r"fallen off"),
    fine="the kernel's log has no Xid",
)
def xid(subject: Subject) -> Iterator[Finding]:
    """errors of the GPUs in the kernel's log"""
    text = subject.host.run(["dmesg"])
    if text is None:
        yield skipped("the kernel's log cannot be read by this user")
        return
    entries: dict[tuple[str, int], list[str]] = {}
    for bus, number, detail in XID.findall(text):
        entries.setdefault((bus, int(number)), []).append(detail)
    for (bus, number), details in entries.items():
        meaning = XID_MEANINGS.get(number, "see NVIDIA's list")
        summary = f"Xid {number} of {bus}, {len(details)} times: {meaning}"
        if number in OF_PROGRAMS:
            yield note(summary, xid=number)
        else:
            cure = (
                "take the GPU out of service, and reset or replace it"
                if number in (48, 63, 64, 79, 95)
                else "look it up, and reset the GPU where it returns"
            )
            yield error(summary, cure, "dmesg | grep -i xid", f"nvidia-smi -q -i {bus}", xid=number, count=len(details))


BUSY = 10
"""Percent of utilization from which a link must run at its full generation: idle ones are slowed down to save power."""


@check(
    why="a riser or a BIOS setting leaves 4 of 16 lanes: loads, and TP without NVLink, get several times slower",
    cure="mend slot, riser or BIOS",
    threads=("vllm-project/vllm/issues/732", "turboderp-org/exllamav2/issues/734"),
    needs=(Need.GPU,),
    fine="PCIe links have their full width",
)
def pcie_link(subject: Subject) -> Iterator[Finding]:
    """width and generation of each PCIe link"""
    for gpu in subject.devices.gpus:
        inspect = f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE && lspci -vv -s {gpu.pci}"
        if gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width:
            yield warning(
                f"GPU {gpu.index} runs on {gpu.pcie_width} of {gpu.max_pcie_width} PCIe lanes",
                "look at slot, riser and BIOS",
                inspect,
                width=gpu.pcie_width,
                most=gpu.max_pcie_width,
            )
        busy = (gpu.utilization or 0) >= BUSY
        if busy and gpu.pcie_generation and gpu.max_pcie_generation and gpu.pcie_generation < gpu.max_pcie_generation:
            yield warning(
                f"GPU {gpu.index} runs at PCIe {gpu.pcie_generation} of {gpu.max_pcie_generation} under load",
                "look at slot, riser and BIOS",
                inspect,
                generation=gpu.pcie_generation,
                most=gpu.max_pcie_generation,
            )


@check(
    why="a rank on the other socket launches each kernel across the sockets' link: 5 to 15 percent where the host bounds a step",
    cure="allow the cores of the GPUs' NUMA nodes",
    threads=("https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",),
    needs=(Need.GPU,),
    fine="cores beside each GPU are allowed, or NVML does not say which they are",
)
def numa(subject: Subject) -> Iterator[Finding]:
    """the cores that this process may use against those beside its GPUs"""
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    for gpu in subject.gpus_in_use:
        if gpu.cpus and allowed and not gpu.cpus & allowed:
            near = _core_ranges(gpu.cpus)
            yield warning(
                f"this process may run on cores {_core_ranges(allowed)}, and GPU {gpu.index} is attached to the NUMA node of cores"
                f" {near}",
                "allow it the cores beside its GPUs",
                f"taskset -c {near} phalanx serve ...",
                "docker run --cpuset-cpus ...",
            )


def _core_ranges(cpus: frozenset[int]) -> str:
    """Core numbers as taskset takes them: 0-3,8-11."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
