"""Confine this process, then run a program in it. Run by path; imports nothing of the package.

Linux on x86-64 only. In this order: a file system in memory over the scratch folder, in a mount namespace of its own;
no capabilities; limits of the process; Landlock, so that the file system is the interpreter's library (to read) and the
scratch folder (to write; where it could not be mounted, to read); a seccomp filter that allows only the system calls of
an interpreter that computes, reads and writes. There are threads, but no sockets, no other processes, no signals to
others, no new programs, and no way to lift any of this. Standard input: a JSON line {"scratch", "read", "memory_mb",
"seconds", "file_mb", "program", "parent"}, then the program's own input.

Exit codes: 97 if a restriction failed (nothing was run); otherwise the program's.
"""

import ctypes
import json
import os
import resource
import struct
import sys

LOCK_FAILED = 97
MAX_FILES = 256  # and folders

# Namespaces and mounts (include/uapi/linux/sched.h, mount.h), capabilities (capability.h)
UNSHARE, MOUNT, CAPGET, CAPSET = 272, 165, 125, 126
NEWNS, NEWUSER = 0x00020000, 0x10000000
NOSUID, NODEV, NOEXEC, RECURSIVE, PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
CAPABILITIES = struct.pack("Ii", 0x20080522, 0)  # version 3, of this thread
READING = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root may need them to read its interpreter

# Landlock (include/uapi/linux/landlock.h)
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = 1, 2, 4, 8, 16, 32
MAKE_DIR, MAKE_REG, REFER, TRUNCATE = 1 << 7, 1 << 8, 1 << 13, 1 << 14
HANDLED_FILES = (1 << 15) - 1  # every right up to TRUNCATE (ABI 3)
READS = READ_FILE | READ_DIR
WRITES = READS | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE
MIN_ABI = 3  # the first that restricts truncation of files

# System calls that the filter allows (arch/x86/entry/syscalls/syscall_64.tbl)
ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getitimer": 36,
    "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "fsync": 74, "fdatasync": 75, "truncate": 76,
    "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87,
    "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111,
    "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "epoll_wait": 232, "epoll_ctl": 233, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "epoll_pwait": 281, "dup3": 292, "pipe2": 293, "epoll_create1": 291, "renameat2": 316, "getrandom": 318,
    "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
IOCTL, FCNTL, CLONE, CLONE3, TGKILL, PRLIMIT = 16, 72, 56, 435, 234, 302
CLONE_THREAD = 0x00010000
IOCTLS = (0x5401, 0x5413, 0x5451, 0x5450, 0x541B)  # TCGETS, TIOCGWINSZ, FIOCLEX, FIONCLEX, FIONREAD
FCNTLS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC

# Berkeley packet filter (include/uapi/linux/filter.h, seccomp.h, audit.h)
LOAD, EQUAL, ABOVE, SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38
X86_64 = 0xC000003E
NUMBER, ARCH, FIRST, SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data; the low halves of the arguments


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    try:
        writable = mount_scratch(job["scratch"], job["file_mb"])
        drop_capabilities()
        prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the program ends with the thread that started it
        if os.getppid() != job["parent"]:
            os._exit(LOCK_FAILED)
        os.chdir(job["scratch"])
        limit(job)
        lock_files(job["scratch"], WRITES if writable else READS, job["read"])
        lock_calls()
    except BaseException as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(LOCK_FAILED)
    program = compile(job["program"], "<program>", "exec")
    job.clear()
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})


def limit(job) -> None:
    """Set hard limits, which cannot be raised again. Without children they hold for the whole tree."""
    seconds, memory, size = int(job["seconds"]) + 1, job["memory_mb"] * 2**20, job["file_mb"] * 2**20
    for kind, bound in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_STACK, 2**26),
    ):
        _, hard = resource.getrlimit(kind)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def call(number: int, *arguments) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, *arguments) -> None:
    values = [ctypes.c_ulong(a) for a in (*arguments, *[0] * (4 - len(arguments)))]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *values) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def mount_scratch(folder: str, size_mb: int) -> bool:
    """Mount a limited file system in memory over a folder, seen by this process alone; False where nobody may."""
    user, group = os.getuid(), os.getgid()
    options = f"size={size_mb}m,nr_inodes={MAX_FILES},mode=700".encode()
    try:
        try:
            call(UNSHARE, ctypes.c_ulong(NEWNS))
        except PermissionError:  # not root: in a user namespace of its own it may
            call(UNSHARE, ctypes.c_ulong(NEWUSER | NEWNS))
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        call(MOUNT, b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)
        flags = ctypes.c_ulong(NOSUID | NODEV | NOEXEC)
        call(MOUNT, b"tmpfs", folder.encode(), b"tmpfs", flags, options)
    except OSError:
        return False
    return True


def drop_capabilities() -> None:
    """Give up all capabilities but those to read files."""
    buffer = ctypes.create_string_buffer(24)
    call(CAPGET, CAPABILITIES, buffer)
    effective, permitted, *_ = struct.unpack("6I", buffer.raw)
    call(CAPSET, CAPABILITIES, struct.pack("6I", effective & READING, permitted & READING, 0, 0, 0, 0))


def lock_files(scratch: str, inside: int, readable) -> None:
    """Restrict the file system to the readable paths, and the rights ``inside`` the scratch folder."""
    abi = call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < MIN_ABI:
        raise OSError(f"Landlock ABI {abi}, expected at least {MIN_ABI}")
    network = 3 if abi >= 4 else 0  # bind and connect of TCP; seccomp forbids sockets anyway
    scoped = 3 if abi >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("QQQ", HANDLED_FILES, network, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = call(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    for path, rights in [(scratch, inside), *((path, READS | EXECUTE) for path in readable)]:
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
        call(ADD_RULE, ctypes.c_int(rules), ctypes.c_int(1), struct.pack("=Qi", rights, handle), ctypes.c_uint(0))
        os.close(handle)
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    call(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def lock_calls() -> None:
    """Allow the calls in ALLOWED, and a few others with arguments that affect no other process."""
    me = os.getpid()
    program = [
        (LOAD, 0, 0, ARCH), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER), (ABOVE, 0, 1, 0x40000000), (RETURN, 0, 0, KILL),  # the x32 table
        (EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | ENOSYS),  # its arguments lie in memory: libc then uses clone
        (EQUAL, 0, 4, CLONE), (LOAD, 0, 0, FIRST), (SET, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | EPERM),
        (EQUAL, 0, 4, TGKILL), (LOAD, 0, 0, FIRST), (EQUAL, 0, 1, me), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | EPERM),
        (EQUAL, 0, 4, PRLIMIT), (LOAD, 0, 0, FIRST), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | EPERM),
    ]  # fmt: skip
    for number, accepted in ((IOCTL, IOCTLS), (FCNTL, FCNTLS)):
        program += [(EQUAL, 0, 2 + 2 * len(accepted), number), (LOAD, 0, 0, SECOND)]
        for value in accepted:
            program += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
        program += [(RETURN, 0, 0, ERRNO | EPERM)]
    for number in sorted(ALLOWED.values()):
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    program += [(RETURN, 0, 0, ERRNO | EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", op, yes, no, k) for op, yes, no, k in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    prctl(22, 2, ctypes.addressof(header))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


if __name__ == "__main__":
    main()
