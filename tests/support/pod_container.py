# SPDX-License-Identifier: Apache-2.0
"""A container of a pod, as its manifest describes it, without an engine for containers: in the pod's network namespace, with mount,
process, IPC and host name namespaces of its own. Its root is read-only and its user is the manifest's, without capabilities.

The "image" is this machine's /usr and this Python with the sources. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import phalanx

TOOLS = ("ip", "unshare", "setpriv", "mount", "chroot")
SOURCES = Path(phalanx.__file__).parents[1]
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = {
    "passwd": "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word of `command` or `args` as the kubelet expands it: $(NAME) of a known name; $$ is a dollar."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)",
        lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
        word,
    )


def _bound(place: str, root: Path) -> list[str]:
    """Shell lines that show a folder of this machine below `root`, read-only."""
    return [f"mkdir -p {root}{place}", f"mount --bind {place} {root}{place}", f"mount -o remount,bind,ro {root}{place}"]


class Container:
    """Runs from its construction on. folder: for its volumes, log and mount point. secrets: name of a Secret -> its data."""

    def __init__(
        self, spec: Mapping[str, Any], folder: Path, *, namespace: str, name: str, address: str, nameserver: str,
        variables: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]],
    ) -> None:  # fmt: skip
        (one,) = spec["containers"]
        self._folder, self._spec, self._secrets = folder, spec, secrets
        folder.mkdir(parents=True)
        shutil.rmtree(folder / "etc", ignore_errors=True)
        (folder / "etc").mkdir()
        search = "default.svc.cluster.local svc.cluster.local cluster.local"
        files = _FILES | {
            "hosts": f"127.0.0.1 localhost\n{address} {name}\n", "hostname": f"{name}\n",
            "resolv.conf": f"nameserver {nameserver}\nsearch {search}\noptions ndots:5\n",
        }  # fmt: skip
        for file, text in files.items():
            (folder / "etc" / file).write_text(text)
        environment = {"PATH": "/image:/usr/bin:/bin", "HOSTNAME": name, "PYTHONPATH": str(SOURCES)} | dict(variables)
        environment |= {each["name"]: each["value"] for each in one["env"]}
        words = [expanded(word, environment) for word in (*one["command"], *one["args"])]
        script = folder / "start.sh"
        script.write_text(self._script(one, name, words, environment))
        self.log = folder / "log"
        with self.log.open("w") as log:
            unshare = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--", "/bin/sh", str(script)]
            self._process = subprocess.Popen(["ip", "netns", "exec", namespace, *unshare], stdout=log, stderr=log)

    def _script(self, one: Mapping[str, Any], name: str, words: list[str], environment: Mapping[str, str]) -> str:
        """What makes the root and becomes the container's process 1."""
        root, etc = self._folder / "root", self._folder / "etc"
        root.mkdir()
        lines = ["set -e", "mount --make-rprivate /", f"hostname {name}", f"mount -t tmpfs -o mode=755 root {root}"]
        lines += [f"mkdir -p {root}/proc {root}/dev {root}/etc {root}/image", f"mount -t proc proc {root}/proc"]
        # An environment may have packages of another one on its path.
        packages = [place for place in sys.path if os.path.isdir(place) and "site-packages" in place]
        image = dict.fromkeys(["/usr", "/sys", sys.base_prefix, sys.prefix, str(SOURCES), *packages])
        for place in image:
            lines += _bound(place, root)
        for link in ("/bin", "/sbin", "/lib", "/lib64"):
            folder = f"mkdir {root}{link}; mount --bind {link} {root}{link}"
            lines.append(f"ln -s usr{link} {root}{link}" if os.path.islink(link) else folder)
        lines += [f"cp {etc}/* {root}/etc/", f"cp -a /etc/ld.so.* /etc/alternatives {root}/etc/ 2>/dev/null || true"]
        lines += [f"mount -t tmpfs -o mode=755 dev {root}/dev", f"mkdir {root}/dev/shm", f"ln -s /proc/self/fd {root}/dev/fd"]
        for device in _DEVICES:
            lines += [f"touch {root}/dev/{device}", f"mount --bind /dev/{device} {root}/dev/{device}"]
        lines.append(f"printf '#!/bin/sh\\nexec {sys.executable} -m phalanx \"$@\"\\n' > {root}/image/phalanx")
        lines.append(f"chmod 755 {root}/image/phalanx")
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        for mount in one["volumeMounts"]:
            lines += self._mount(volumes[mount["name"]], f"{root}{mount['mountPath']}", read_only=bool(mount.get("readOnly")))
            for place in image:  # a checkout in /tmp lies below a volume
                lines += _bound(place, root) if place.startswith(f"{mount['mountPath']}/") else []
        if one["securityContext"]["readOnlyRootFilesystem"]:
            lines += [f"mount -o remount,ro {root}", f"mount -o remount,ro {root}/dev"]
        user = self._spec["securityContext"]
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        drop = f"--reuid {user['runAsUser']} --regid {user['runAsGroup']} --groups {user['fsGroup']}"
        drop += " --inh-caps=-all --bounding-set=-all"
        drop += "" if one["securityContext"]["allowPrivilegeEscalation"] else " --no-new-privs"
        variables = " ".join(shlex.quote(f"{key}={value}") for key, value in environment.items())
        # chroot leaves the working folder at the image's WORKDIR.
        begin = "cd /tmp && exec env -i " + variables + " setpriv " + drop + " -- " + shlex.join(words)
        lines.append(f"exec chroot {root} /bin/sh -c {shlex.quote(begin)}")
        return "\n".join(lines) + "\n"

    def _mount(self, volume: Mapping[str, Any], place: str, *, read_only: bool) -> list[str]:
        """Shell lines that mount a volume as the kubelet does."""
        group = self._spec["securityContext"]["fsGroup"]
        lines = [f"mkdir -p {place}"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            return [*lines, f"mount -t tmpfs -o mode=1777,size={size} volume {place}"]
        source = self._folder / "volumes" / volume["name"]
        source.mkdir(parents=True)
        if secret := volume.get("secret"):
            for item in secret["items"]:
                file = source / item["path"]
                file.write_text(self._secrets[secret["secretName"]][item["key"]])
                file.chmod(secret["defaultMode"])
                os.chown(file, 0, group)
        else:
            assert volume["emptyDir"] == {}, f"volumes of this kind are not run: {volume}"
            os.chown(source, 0, group)
            source.chmod(0o2777)
        lines.append(f"mount --bind {source} {place}")
        return [*lines, f"mount -o remount,bind,ro {place}"] if read_only else lines

    @property
    def status(self) -> int | None:
        """The exit status: negative for a signal. None while it runs."""
        status = self._process.poll()
        return status if status is None or status < 128 else 128 - status

    def first(self) -> psutil.Process:
        """The container's process 1. Raises psutil.NoSuchProcess where it has ended."""
        children = psutil.Process(self._process.pid).children()
        if not children:
            raise psutil.NoSuchProcess(self._process.pid)
        return children[0]

    def processes(self) -> list[psutil.Process]:
        return [self.first(), *self.first().children(recursive=True)]

    def signal(self, number: int) -> None:
        """Send a signal to process 1; a container that has ended gets none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.first().send_signal(number)

    def wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status
