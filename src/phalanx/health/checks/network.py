# SPDX-License-Identifier: Apache-2.0
"""Interfaces, RDMA, names, ports and proxies."""

from __future__ import annotations

import ipaddress

from phalanx.config.sources import is_service_link
from phalanx.health.check import Finding, Need, check, error, note, ok, warning
from phalanx.health.subject import Subject

VIRTUAL_INTERFACES = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali")


@check(
    why="a name of another machine's interface, or docker0, ends a start in a hang or in 'no socket interface found'",
    cure="name an interface that leads to the other hosts, or unset the variable",
    threads=("vllm-project/vllm/issues/7074", "gpustack/gpustack/issues/2125", "sgl-project/sglang/issues/3226"),
    symptoms=(r"[Ss]ocket interface", r"gloo", r"Unable to find address", r"no interface", r"connectFullMesh"),
)
def network_interface(subject: Subject) -> list[Finding]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"""
    findings = [
        finding for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") for finding in _examine_variable(subject, variable)
    ]
    return findings or [ok("no variable names a missing or unsuitable interface")]


def _examine_variable(subject: Subject, variable: str) -> list[Finding]:
    text = subject.host.environment.get(variable, "")
    several_hosts = subject.options is not None and subject.options.nnodes > 1
    interfaces = subject.host.interfaces()
    usable = [name for name in interfaces if _leads_out(subject, name, interfaces)]
    cure = f"name one of: {', '.join(usable) or 'none of this host leads to others'}"
    command = f"export {variable}={usable[0]}" if usable else f"unset {variable}"
    if text.startswith("^") and variable.startswith("GLOO"):
        return [error(f"{variable}={text} is no interface: gloo takes one name, and no list of exclusions", cure, command)]
    if not text or text.startswith("^"):
        return []
    exact, names = text.startswith("="), [name for name in text.lstrip("=").split(",") if name]
    if variable.startswith("GLOO"):
        exact = True
    for name in names:
        matching = [each for each in interfaces if each == name or (not exact and each.startswith(name))]
        if not matching:
            return [error(f"{variable}={text} names {name}, and this host has {', '.join(interfaces)}", cure, command)]
        down = [each for each in matching if not subject.host.interface_is_up(each)]
        if len(down) == len(matching):
            return [error(f"{variable}={text} names {name}, which is down", cure, f"ip link set {matching[0]} up", command)]
        if several_hosts and not any(_leads_out(subject, each, interfaces) for each in matching):
            return [error(f"{variable}={text} names {name}, which other hosts do not reach", cure, command)]
    return []


def _leads_out(subject: Subject, name: str, interfaces: dict[str, list[str]]) -> bool:
    if name.startswith(VIRTUAL_INTERFACES) or not subject.host.interface_is_up(name):
        return False
    return any(not ipaddress.ip_address(address).is_loopback for address in interfaces[name])


@check(
    why="NCCL falls back to TCP, an order of magnitude slower, without a word",
    cure="bring the ports up",
    threads=("NVIDIA/nccl-tests/issues/206", "NVIDIA/nccl/issues/1191"),
    needs=(Need.HOSTS,),
    symptoms=(r"ibv_", r"IB ", r"infiniband"),
)
def rdma_ports(subject: Subject) -> list[Finding]:
    """InfiniBand and RoCE ports, where there are several hosts"""
    devices = subject.host.rdma_devices
    if not devices:
        return [
            note(
                "this host has no RDMA device: hosts exchange data over TCP, which suits PP and not TP",
                "keep TP inside a host",
                "phalanx topo",
            )
        ]
    findings = []
    up = []
    for device in devices:
        folder = subject.host.path(f"/sys/class/infiniband/{device}/ports")
        for port in sorted(folder.iterdir()) if folder.is_dir() else []:
            state = subject.host.read(f"/sys/class/infiniband/{device}/ports/{port.name}/state") or ""
            rate = subject.host.read(f"/sys/class/infiniband/{device}/ports/{port.name}/rate") or "?"
            if "ACTIVE" in state:
                up.append(f"{device} {rate}")
            else:
                findings.append(f"port {port.name} of {device} is {state.partition(': ')[2] or state or 'unknown'}")
    if findings and not up:
        return [error(f"no RDMA port is active: {'; '.join(findings)}", "check cables, switch and subnet manager", "ibstat")]
    if findings:
        return [note(f"{len(up)} RDMA ports are active; {'; '.join(findings)}", "plug in or leave unused", "ibstat")]
    peer_memory = subject.host.path("/sys/module/nvidia_peermem").exists() or subject.host.path("/sys/module/nv_peer_mem").exists()
    if subject.devices.gpus and not peer_memory:
        return [
            note(
                f"{', '.join(up)}; without the module nvidia_peermem data goes through host memory, unless DMA-BUF is used",
                "load it",
                "modprobe nvidia-peermem",
            )
        ]
    return [ok(", ".join(up))]


@check(
    why="gloo announces the address of the host name: 127.0.x.x makes other hosts connect to themselves (connectFullMesh failed)",
    cure="map the host name to an address that other hosts reach",
    threads=(
        "vllm-project/vllm/issues/5094",
        "vllm-project/vllm/issues/7074",
        "sgl-project/sglang/issues/868",
        "sgl-project/sglang/issues/3226",
    ),
    needs=(Need.HOSTS,),
    symptoms=(r"connectFullMesh", r"gloo", r"did not come up", r"has not joined"),
)
def host_name(subject: Subject) -> Finding:
    """what this host's name resolves to, where there are several hosts"""
    name = subject.host.name
    try:
        addresses = subject.host.resolve(name)
    except OSError as failure:
        return warning(
            f"the host name {name} does not resolve: {failure.strerror or failure}",
            "add it to /etc/hosts with this host's address",
            f'echo "{_address(subject) or "ADDRESS"} {name}" >> /etc/hosts',
        )
    loopback = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if loopback and len(loopback) == len(addresses):
        return _names_loopback(subject, name, loopback[0])
    return ok(f"{name} resolves to {', '.join(addresses)}")


def _names_loopback(subject: Subject, name: str, loopback: str) -> Finding:
    """Harmless to Phalanx itself, which binds gloo by its route to master_addr, unless the name is master_addr, or Ray is used."""
    options, address = subject.options, _address(subject) or "ADDRESS"
    summary = f"the host name {name} resolves to {loopback}, which no other host reaches"
    cure = "map the name to this host's address in /etc/hosts"
    command = f'sed -i "s/^127[0-9.]*\\s\\+{name}/{address} {name}/" /etc/hosts'
    if options is not None and options.master_addr == name:
        return error(f"{summary}; it is master_addr", cure, command, f"phalanx serve ... --master_addr {address}")
    if subject.host.environment.get("RAY_ADDRESS"):
        return warning(
            f"{summary}, and Ray announces it", cure, command, f"export GLOO_SOCKET_IFNAME={_interface(subject) or 'eth0'}"
        )
    return note(f"{summary}; Phalanx binds to the interface of its route to master_addr instead", cure, command)


def _outward(subject: Subject) -> list[tuple[str, str]]:
    """(interface, address) of this host that other hosts may reach."""
    entries = [(name, address) for name, addresses in subject.host.interfaces().items() for address in addresses]
    return [
        (name, address)
        for name, address in entries
        if not ipaddress.ip_address(address).is_loopback and subject.host.interface_is_up(name)
    ]


def _address(subject: Subject) -> str | None:
    return next((address for _, address in _outward(subject)), None)


def _interface(subject: Subject) -> str | None:
    return next((name for name, _ in _outward(subject)), None)


@check(
    why="a server that still runs, or a process that outlived it, has the port: 'address already in use'",
    cure="end the process that has the port, or choose another",
    threads=("vllm-project/vllm/issues/8447", "vllm-project/vllm/issues/34643"),
    needs=(Need.MODEL,),
    symptoms=(r"[Aa]ddress already in use", r"EADDRINUSE", r"\bport\b"),
)
def port_free(subject: Subject) -> list[Finding]:
    """the ports of the options"""
    options = subject.options
    assert options is not None
    ports = {"--port": (subject.serving.host, subject.serving.port)} if options.node_rank == 0 else {}
    if options.nnodes > 1 and options.node_rank == 0:
        ports |= {"--master_port": ("0.0.0.0", options.master_port)}
    findings = [_port_taken(subject, name, *place) for name, place in ports.items() if place[1]]
    return [finding for finding in findings if finding] or [ok("the ports to listen on are free")]


def _port_taken(subject: Subject, name: str, address: str, port: int) -> Finding | None:
    failure = subject.host.can_bind(address, port)
    if failure is None:
        return None
    listener = subject.host.listener(port)
    other = f"phalanx serve ... {name} {port + 10}"
    if listener is None:
        return error(
            f"{name} {port} of {address} cannot be listened on: {failure.strerror or failure}",
            "choose another address or port",
            other,
        )
    if listener.orphan:
        summary = f"{name} {port} is taken by {listener.command} (pid {listener.pid}), an orphan of an engine that has ended"
        return error(summary, "end it", f"kill -9 {listener.pid}", pid=listener.pid)
    holder = listener.command if listener.pid is None else f"{listener.command} (pid {listener.pid})"
    commands = [other] if listener.pid is None else [f"kill {listener.pid}", other]
    return error(f"{name} {port} is taken by {holder}", "end it, or choose another port", *commands, pid=listener.pid)


@check(
    why="requests to localhost, and health checks of containers, go to the proxy, which answers 502 or 403",
    cure="exclude localhost from the proxy",
    threads=("vllm-project/vllm/issues/7074", "https://curl.se/docs/manpage.html"),
    symptoms=(r"\b502\b", r"\bproxy\b"),
)
def proxy(subject: Subject) -> Finding:
    """http_proxy and no_proxy"""
    environment = subject.host.environment
    proxy = environment.get("http_proxy") or environment.get("HTTP_PROXY")
    if not proxy:
        return ok("no HTTP proxy is set")
    excluded = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").replace(" ", "").split(",")
    local = {"localhost", "127.0.0.1"}
    if "*" in excluded or local <= set(excluded):
        return ok(f"the proxy {proxy} is not used for this host")
    missing = sorted(local - set(excluded))
    return note(
        f"http_proxy={proxy} also stands for {' and '.join(missing)}: curl and OpenAI clients of this host ask the proxy for the"
        " server",
        "exclude this host",
        f"export no_proxy={','.join([*filter(None, excluded), *missing])}",
    )


@check(
    why="0.0.0.0 is every address of IPv4 alone: a host or pod that has IPv6 only is never ready",
    cure="listen on :: where the network is IPv6",
    threads=("vllm-project/vllm/issues/8447", "https://kubernetes.io/docs/concepts/services-networking/dual-stack/"),
    needs=(Need.MODEL,),
)
def listen_address(subject: Subject) -> Finding:
    """the families of addresses on which the server listens"""
    host = subject.serving.host
    outward = {address for _, address in _outward(subject)}
    families = {ipaddress.ip_address(address).version for address in outward}
    if host == "0.0.0.0" and families == {6}:
        return error(
            "host='0.0.0.0' listens on IPv4 alone, and this host has addresses of IPv6 only",
            "listen on every address of both families",
            "phalanx serve ... --host ::",
        )
    if subject.host.in_container and host in ("127.0.0.1", "::1", "localhost"):
        return note(
            f"host={host!r} is reached from inside this container alone", "listen on every address", "phalanx serve ... --host ::"
        )
    return ok(f"the server listens on {host}")


@check(
    why="Kubernetes puts variables of every Service into a pod: those of a Service phalanx-... begin as ours do",
    cure="none is needed: they are no options; enableServiceLinks: false keeps them out",
    threads=("https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables",),
    symptoms=(r"unknown environment variable", r"SERVICE_HOST"),
)
def service_variables(subject: Subject) -> Finding:
    """variables of Services whose names begin with phalanx"""
    names = [name for name, value in subject.host.environment.items() if is_service_link(name, value)]
    if names:
        return note(
            f"{len(names)} variables of Kubernetes' Services begin as options do: {', '.join(sorted(names)[:3])}; they are ignored",
            "keep them out with enableServiceLinks: false",
        )
    return ok("no variable of a Service begins as an option does")
