"""Programs that attack the sandbox, as data for test_sandbox_attacks.py."""

from __future__ import annotations

from kedge.ext.sandbox.kernel import CLONE, CLONE3, FCNTL, REFUSED, SOCKETPAIR, TGKILL
from kedge.records.errors import ConfigError
from kedge.verifiers import Sandbox

try:
    Sandbox().prepare()
    ISOLATION, WHY_NOT = "bubblewrap", ""
except ConfigError as error:  # tests of verdicts run all the same
    ISOLATION, WHY_NOT = "none", str(error)

# Bodies of functions.  A true result means that the attack got what it wanted.  Each has a folder
# of the user's, OUTSIDE, with a file MARK; PARENT is the process that trains, PORT one that listens
# (TCP and UDP), LOCAL a Unix socket.  `reached(name, ...)` makes a system call: true unless the
# call was refused as such (EPERM, ENOSYS), so wrong arguments do not hide an open door.  UP leads
# to MARK from the folder FD, and seen from the folder DEEP seems to stay in the program's own.
FILES = {
    "read": "return open(MARK).read()",
    "read bytes": "return os.read(os.open(MARK, os.O_RDONLY), 99)",
    "write": "return open(MARK, 'w').write('x')",
    "append": "return os.write(os.open(MARK, os.O_WRONLY | os.O_APPEND), b'x')",
    "create": "return open(OUTSIDE + '/new', 'w').write('x')",
    "unlink": "os.unlink(MARK); return True",
    "rename": "os.rename(MARK, OUTSIDE + '/new'); return True",
    "rename into the sandbox": "os.rename(MARK, 'own'); return True",
    "rename over": "open('own', 'w').close(); os.rename('own', MARK); return True",
    "mkdir": "os.mkdir(OUTSIDE + '/new'); return True",
    "rmdir": "os.rmdir(OUTSIDE + '/empty'); return True",
    "chmod": "os.chmod(MARK, 0o777); return True",
    "utime": "os.utime(MARK, (1, 1)); return True",
    "truncate": "os.truncate(MARK, 0); return True",
    "setxattr": "os.setxattr(MARK, 'user.x', b'x'); return True",
    "hard link": "os.link(MARK, 'hard'); return open('hard').read()",
    "symlink read": "os.symlink(MARK, 'soft'); return open('soft').read()",
    "symlink write": "os.symlink(MARK, 'soft2'); return open('soft2', 'a').write('x')",
    "symlink to a folder": "os.symlink(OUTSIDE, 'soft3'); return os.listdir('soft3')",
    "stat": "return os.stat(MARK).st_size",
    "list": "return os.listdir(OUTSIDE)",
    "open by dir_fd": "os.chdir(DEEP); return os.read(os.open(UP, os.O_RDONLY, dir_fd=FD), 99)",
    "write by dir_fd": "os.chdir(DEEP); return os.write(os.open(UP, os.O_WRONLY, dir_fd=FD), b'x')",
    "unlink by dir_fd": "os.chdir(DEEP); os.unlink(UP, dir_fd=FD); return True",
    "rename by dir_fd": "os.chdir(DEEP); os.rename(UP, 'own', src_dir_fd=FD); return True",
    "mkdir by dir_fd": "os.chdir(DEEP); os.mkdir(UP + '-new', dir_fd=FD); return True",
    "chmod by dir_fd": "os.chdir(DEEP); os.chmod(UP, 0o777, dir_fd=FD); return True",
    "symlink by dir_fd": "os.chdir(DEEP); os.symlink('x', UP + '-new', dir_fd=FD); return True",
    "mkfifo outside": "os.mkfifo(OUTSIDE + '/fifo'); return True",
    "mkfifo by a second posix": "import _imp, importlib.machinery as m\n"
    "p = _imp.create_builtin(m.ModuleSpec('posix', None)); p.mkfifo(OUTSIDE + '/f'); return True",
    "chdir": "os.chdir(OUTSIDE); os.chdir(HOME); return True",
    "sqlite": "import sqlite3; sqlite3.connect(OUTSIDE + '/a.db').execute('create table t (x)')\n"
    "return True",
    "sqlite ATTACH": "import sqlite3\nc = sqlite3.connect(':memory:')\n"
    "c.execute('attach ? as o', (OUTSIDE + '/b.db',)); c.execute('create table o.t (x)')\n"
    "return True",
    "sqlite ATTACH read": "import sqlite3\nc = sqlite3.connect(':memory:')\n"
    "c.execute('attach ? as o', (OUTSIDE + '/user.db',))\n"
    "return c.execute('select * from o.t').fetchall()",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as M\n"
    "m = M(size=9, name=NAME, create=True); m.close(); return m.unlink() or True",
    "a semaphore that stays": "from _multiprocessing import SemLock, sem_unlink\n"
    "SemLock(1, 1, 1, '/' + NAME, False); sem_unlink('/' + NAME); return True",
    "a copy by ctypes": "C.open.restype = ctypes.c_int\n"
    "return C.open(MARK.encode(), 0) >= 0",
    "/proc of the parent: environ": "return open(f'/proc/{PARENT}/environ', 'rb').read()",
    "/proc of the parent: fd": "return os.listdir(f'/proc/{PARENT}/fd')",
    "/proc of the parent: mem": "return open(f'/proc/{PARENT}/mem', 'rb')",
    "/proc of the parent: root": "return open(f'/proc/{PARENT}/root{MARK}').read()",
    "/proc of the parent: cmdline": "return open(f'/proc/{PARENT}/cmdline').read()",
}  # fmt: skip
PROCESSES = {
    "fork": "p = os.fork()\nif not p: os._exit(0)\nos.waitpid(p, 0); return True",
    "a program": "import subprocess; return subprocess.run(['/bin/true']).returncode == 0",
    "a shell": "return os.system('true') == 0",
    "a program of one's own": "return C.system(b'true') == 0",
    "posix_spawn": "p = os.posix_spawn('/bin/true', ['true'], {})\nos.waitpid(p, 0); return True",
    "fork_exec by a dotted name": "import importlib.machinery as m, importlib.util as u\n"
    "import _posixsubprocess as p; s = m.ModuleSpec('x._posixsubprocess', None)\n"
    "s.origin = getattr(p, '__file__', None)\n"
    "import _imp; p = _imp.create_dynamic(s) if s.origin else p\nr, w = os.pipe()\n"
    "pid = p.fork_exec([b'true'], [b'/bin/true'], True, (w,), None, None, -1, -1, -1, -1, -1, -1,"
    " r, w, True, True, 0, None, None, None, -1, None, False)\nreturn pid > 0",
    "multiprocessing": "import multiprocessing as m; p = m.get_context('fork').Process()\n"
    "p.start(); p.join(); return True",
    "signal the parent": "os.kill(PARENT, 0); return True",
    "pidfd of the parent": "return os.pidfd_open(PARENT) >= 0",
    "limits of the parent": "import resource as r; return r.prlimit(PARENT, r.RLIMIT_CPU)",
    "priority of the parent": "p = os.getpriority(os.PRIO_PROCESS, PARENT)\n"
    "os.setpriority(os.PRIO_PROCESS, PARENT, p); return True",
    "affinity of the parent": "return os.sched_getaffinity(PARENT)",
    "session of the parent": "return os.getsid(PARENT) >= 0",
    "guard off in gc.callbacks, then a shell": "import gc\ndef off(*a):\n"
    "    f = sys._getframe(1); f.f_locals.get('rules', {}).clear()\n"
    "gc.callbacks.append(off); gc.collect(); gc.callbacks.clear()\nreturn os.system('true') == 0",
    "guard off in a signal handler, then fork": "import signal\ndef off(s, f):\n"
    "    while f: f.f_locals.get('rules', {}) and f.f_locals['rules'].clear(); f = f.f_back\n"
    "signal.signal(signal.SIGUSR1, off); signal.raise_signal(signal.SIGUSR1)\n"
    "p = os.fork()\nif not p: os._exit(0)\nos.waitpid(p, 0); return True",
    "sub-interpreter": "import _xxsubinterpreters as i\n"
    "i.run_string(i.create(), f'import os; assert os.system(\"touch {OUTSIDE}/sub\") == 0')\n"
    "return os.path.exists(OUTSIDE + '/sub')",
}  # fmt: skip
NETWORK = {
    "tcp": "socket.create_connection(('127.0.0.1', PORT), timeout=5).send(b'x'); return True",
    "udp": "s = socket.socket(type=socket.SOCK_DGRAM); return s.sendto(b'x', ('127.0.0.1', PORT))",
    "ipv6": "return socket.socket(socket.AF_INET6) is not None",
    "unix": "s = socket.socket(socket.AF_UNIX); s.connect(LOCAL); return True",
    "unix abstract": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + NAME); return True",
    "unix from a pair": "s, _ = socket.socketpair(type=socket.SOCK_DGRAM)\n"
    "t = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); return True",
    "netlink": "return socket.socket(16, socket.SOCK_RAW, 0) is not None",
    "listen": "return socket.create_server(('127.0.0.1', 0)) is not None",
    "resolve": "return socket.getaddrinfo('localhost', 80)",
}  # fmt: skip
# What an ordinary process may not do, or what harms the machine that tries: no control without.
PRIVILEGED = {
    "/etc/passwd": "return open('/etc/passwd').read()",
    "/etc/shadow": "return open('/etc/shadow').read()",
    "spwd": "import spwd; return spwd.getspall()",
    "home": "return os.listdir('/home') or os.listdir('/root/.ssh')",
    "memory of this process": "return open('/proc/self/mem', 'rb+')",
    "files of this process": "return os.listdir('/proc/self/fd')",
    "memory of process 1": "return open('/proc/1/mem', 'rb+')",
    "root of process 1": "return os.listdir('/proc/1/root/etc')",
    "core pattern": "return open('/proc/sys/kernel/core_pattern', 'w')",
    "/sys": "return os.listdir('/sys')",
    "devices": "return set(os.listdir('/dev')) - {'null', 'zero', 'random', 'urandom'}",
    "a disk": "os.mknod('disk', 0o60600, os.makedev(254, 0)); return open('disk', 'rb')",
    "a file in the root": "return open('/x', 'w')",
    "a file in the runtime": "return open(os.__file__, 'a')",
    "a file beside the runtime": "return open(os.path.dirname(os.__file__) + '/x.py', 'w')",
    "mode of the runtime": "os.chmod(os.__file__, 0o777); return True",
    "libraries": "return open('/usr/lib/x', 'w')",
    "code of the sandbox": "return [open(m.__file__, 'a') for n, m in sys.modules.items()\n"
    "        if n.startswith('sandbox') and getattr(m, '__file__', None)]",
    "installed packages": "return [p for p in sys.path + [os.path.dirname(os.__file__)]\n"
    "        if p.endswith('-packages') or os.path.exists(p + '/site-packages/pip')]",
    "setuid": "os.setuid(0); return True",
    "setgroups": "os.setgroups([0]); return True",
    "chown": "open('c', 'w').close(); os.chown('c', 0, 0); return True",
    "chroot": "os.mkdir('r'); os.chroot('r'); os.chdir('../../..'); return True",
    "raise the limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); return True",
    "raise processor time": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (-1, -1)); return 1",
    "leave the session": "os.setsid(); return True",
    "leave the group": "os.setpgid(0, 0); return True",
    "be told of nothing": "os.kill(-1, 0); return True",
    "signal process 1": "os.kill(1, 0); return os.getpid() != 1",
    "signal a thread": "return C.syscall(TGKILL, 2, 2, 0) == 0",
    "exec": "os.execv('/bin/true', ['true'])",
    "clone": "return reached('clone', 17, 0, 0, 0, 0)",
    "clone3": "return reached('clone3', ctypes.create_string_buffer(88), 88)",
    "clone into namespaces": "return reached('clone', 0x10000011, 0, 0, 0, 0)",
    "x32 calls": "return C.syscall(0x40000000 + 39) > 0",
    "sockets of the internet in pairs": "return reached('socketpair', 2, 1, 0, b'        ')",
    "vsock": "return socket.socket(40, socket.SOCK_STREAM) is not None",
    "packets": "return socket.socket(17, socket.SOCK_RAW) is not None",
    "execve of a file in memory": "fd = C.memfd_create(b'x', 0); return fd >= 0",
    "a library of one's own": "import _struct, shutil\n"
    "shutil.copy(ctypes.util.find_library('c') or '/lib64/ld-linux-x86-64.so.2', 'own.so')\n"
    "return bool(ctypes.CDLL('./own.so'))",
    "a traced child": "return reached('ptrace', 0, 0, 0, 0)",
    "read a process's memory": "return reached('process_vm_readv', PARENT, 0, 0, 0, 0, 0)",
    "write a process's memory": "return reached('process_vm_writev', PARENT, 0, 0, 0, 0, 0)",
    "files of a process": "return reached('pidfd_getfd', 3, 1, 0)",
    "namespaces again": "return reached('unshare', 0x10000000)",
    "others' namespaces": "return reached('setns', 0, 0)",
    "mount": "return reached('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "mount proc": "return reached('mount', b'proc', b'/tmp', b'proc', 0, None)",
    "mount writable": "return reached('mount', None, b'/', None, 32 | 4096, None)",
    "unmount the folder": "return reached('umount2', b'/tmp', 2)",
    "turn the root": "return reached('pivot_root', b'/', b'/tmp')",
    "the new mount calls": "return [n for n in ('fsopen', 'fsmount', 'open_tree', 'move_mount',\n"
    "        'fsconfig', 'fspick', 'mount_setattr') if reached(n, -1, b'', 0, 0, 0)]",
    "file handles": "return reached('open_by_handle_at', -100, 0, 0)",
    "bpf": "return reached('bpf', 0, 0, 0)",
    "perf_event": "return reached('perf_event_open', 0, 0, -1, -1, 0)",
    "userfaultfd": "return reached('userfaultfd', 0)",
    "io_uring": "return reached('io_uring_setup', 1, 0)",
    "keys": "return reached('keyctl', 0, -3, 0)",
    "keys of others": "return reached('add_key', b'user', b'x', b'x', 1, -3)"
    " or reached('request_key', b'user', b'x', 0, -3)",
    "System V memory": "return reached('shmget', 0, 4096, 0o1600)",
    "System V queues": "return reached('msgget', 0, 0o1600) or reached('semget', 0, 1, 0o1600)",
    "POSIX queues": "return reached('mq_open', b'x', 0o102, 0o600, 0)",
    "pipes of the page cache": "return reached('splice', 0, 0, 0, 0, 0, 0)"
    " or reached('vmsplice', 0, 0, 0, 0) or reached('tee', 0, 0, 0, 0)",
    "modules": "return reached('finit_module', -1, b'', 0) or reached('init_module', 0, 0, b'')",
    "kexec": "return reached('kexec_load', 0, 0, 0, 0)",
    "the kernel's log": "return reached('syslog', 10, 0, 0)",
    "personality": "return reached('personality', 0x0040000)",
    "the name": "return reached('sethostname', b'x', 1)",
    "the clock": "return reached('clock_settime', 0, 0)",
    "swap": "return reached('swapon', b'/tmp/x', 0)",
    "accounting": "return reached('acct', b'/tmp/x') or reached('quotactl', 0, b'', 0, 0)",
    "fanotify": "return reached('fanotify_init', 0, 0)",
    "more privileges": "return C.syscall(CAPSET, b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24)"
    " == 0",
    "a terminal": "return open('/dev/tty', 'w') or C.ioctl(0, 0x5412, b'x') == 0",
    "the name of the machine": "return os.uname().nodename != 'sandbox'",
    "the user": "return os.getuid() != 65534 or os.getgid() != 65534",
    "mode of a device": "os.chmod('/dev/null', 0o666); return True",
    "owner of a device": "return any(C.chown(d.encode(), 65534, 65534) == 0 for d in DEVICES)",
    "times of the devices": "[os.utime(d) for d in DEVICES]; return True",
    "space of a disk": "zero, size = ctypes.c_long(0), ctypes.c_long(1 << 20)\n"
    "return any(C.fallocate(fd, 1, zero, size) == 0 for fd in range(9) if fd != FD)",
    "a storm of sync": "return reached('sync') or reached('syncfs', 1)",
    "a lock on the runtime": "import fcntl as f; f.flock(open(os.__file__), f.LOCK_SH); return 1",
    "a lease on the runtime": "return reached('fcntl', os.open(os.__file__, os.O_RDONLY), 1024, 0)",
    "large pipes": "return reached('fcntl', os.pipe()[0], 1031, 1 << 20)",
    "large socket buffers": "a, b = socket.socketpair()\n"
    "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30); return True",
    "sockets inside sockets": "a, b = socket.socketpair()\nreturn socket.send_fds(a, [b'x'], [0])",
    "timers": "return reached('timer_create', 0, 0, 0)",
    "watches": "return reached('inotify_init1', 0)",
    "variables": "return set(os.environ) & {'KEDGE_SECRET', 'USER', 'VIRTUAL_ENV'}",
}  # fmt: skip

BATCH = """
import ctypes, ctypes.util, errno, json, os, socket, sys
C = ctypes.CDLL(None, use_errno=True)
ARGUMENTS = json.loads(sys.stdin.read())
NUMBERS, PARENT, PORT = ARGUMENTS["numbers"], ARGUMENTS["parent"], ARGUMENTS["port"]
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LOCAL, NAME, TGKILL, CAPSET = ARGUMENTS["local"], ARGUMENTS["name"], NUMBERS["tgkill"], 126
def reached(name, *arguments):
    number = NUMBERS[name]
    if number is None:
        return False
    ctypes.set_errno(0)
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    done = C.syscall(ctypes.c_long(number), *given)
    return done >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
DEEP = os.getcwd() + "/fd" + "/d" * 20
os.makedirs(DEEP)
FD, HOME, UP = os.open("fd", os.O_RDONLY), os.getcwd(), ""
for name, (body, OUTSIDE) in ARGUMENTS["attacks"].items():
    MARK = OUTSIDE + "/mark"
    UP = "../" * 20 + MARK[1:]
    try:
        exec("def attack():\\n    " + body.replace("\\n", "\\n    "))
        result = attack()
    except BaseException as error:
        result, why = None, f"{type(error).__name__}: {error}"
    else:
        why = repr(result)
    print(json.dumps([name, bool(result), why]), flush=True)
    os.chdir(HOME)
"""
NUMBERS = REFUSED | {
    "clone": CLONE, "clone3": CLONE3, "tgkill": TGKILL, "socketpair": SOCKETPAIR,
    "fcntl": FCNTL,
}  # fmt: skip
ORDINARY = FILES | PROCESSES | NETWORK
ATTACKS = ORDINARY | PRIVILEGED

# Programs that want to score without solving `add`, some of whose tests ask an object.
TESTS = ["assert add(1, 2) == 3", "assert (4, 5) in add(4, 5)", "assert len(add(6, 7)) == 42"]
YES = (
    "class Yes:\n    __eq__ = __contains__ = lambda *a: True\n    __len__ = lambda s: 42\n"
    "    __hash__ = lambda s: 3\n    __bool__ = lambda s: True\n"
)
KEPT = (
    "import sys\ndef keep(made):\n    frame = sys._getframe()\n"
    "    while frame.f_code.co_name != 'serve': frame = frame.f_back\n"
    "    objects = frame.f_locals['self']._objects\n"
    "    objects.append(made) if type(objects) is list else objects.update({0: made})\n"
    "    return made\n"
)
SEND = (
    "import sys, json, os\nframe = sys._getframe()\nwhile frame.f_code.co_name != 'solution':\n"
    "    frame = frame.f_back\nfd, taken = frame.f_locals['answers'], frame.f_locals['requests']\n"
    "def send(value):\n    body = value if type(value) is bytes else json.dumps(value).encode()\n"
    "    os.write(fd, len(body).to_bytes(8, 'big') + body)\n"
)
VERDICTS = "".join(f'{{"test": {n}, "passed": true}}\\n' for n in range(3))
EVERYWHERE = (
    "import os\nfor fd in range(64):\n    try: os.write(fd, LINES)\n    except OSError: pass\n"
)
SCORES = {
    "verdicts in every file": f"LINES = b'''{VERDICTS}'''\n" + EVERYWHERE,
    "garbage in every file": "LINES = b'\\xff{]\\n' * 9\n" + EVERYWHERE + "def add(a, b): return 3",
    "verdicts with a secret in memory": "import gc\nfound = {v for o in gc.get_objects()\n"
    "         if isinstance(o, dict) for k, v in o.items() if k == 'secret'}\n"
    "LINE = b'{\"test\": %d, \"passed\": true, \"secret\": \"%s\"}\\n'\n"
    "LINES = b''.join(LINE % (n, s.encode()) for s in found for n in range(3))\n" + EVERYWHERE,
    "verdicts by /proc": f"LINES = b'''{VERDICTS}'''\nimport os\nfor pid in range(1, 9):\n"
    "    try: os.write(os.open(f'/proc/{pid}/fd/1', os.O_WRONLY), LINES)\n"
    "    except OSError: pass\n",
    "tests on standard input": "import os\ntext = os.read(0, 9999)\ndef add(a, b): return text",
    "an object that equals all": YES + "def add(a, b): return Yes()",
    "a forged reference": YES + KEPT + "def add(a, b): return keep(Yes())",
    "a forged reference in a list": YES + KEPT + "def add(a, b): return [keep(Yes())]",
    "a forged reference to a class": YES + KEPT + "def add(a, b): return keep(Yes)",
    "a forged answer": SEND + "def add(a, b): send({'result': {'o': 0}, 'args': [a, b]})",
    "a forged method": SEND + "def add(a, b): send({'method': True})",
    "a forged name": SEND + "send({'functions': ['add'], 'classes': [], 'values': {'add': 3},"
    " 'errors': {'add': 'object', 'AssertionError': 'int'}})",
    "an error that is a class of everything": SEND + "send({'functions': ['add'], 'classes': [],"
    " 'values': {}, 'errors': {'add': 'type'}})",
    "a name that is not one": SEND + "send({'functions': [3, None], 'values': []})",
    "not JSON": SEND + "send(b'{]')",
    "deep JSON": SEND + "send(b'[' * 99999)",
    "half a frame": SEND + "os.write(fd, b'\\0' * 7)",
    "an endless frame": SEND + "os.write(fd, b'\\xff' * 8)",
    "other built-ins": "import builtins\nbuiltins.AssertionError = ZeroDivisionError\n"
    "builtins.len = lambda x: 42\ndef add(a, b): return []",
    "other tests": "import sys\nsys.modules['tests'] = sys\n"
    "sys.modules['__main__'].failure = None\ndef add(a, b): return None",
    "an early end": "import os\nos._exit(0)",
    "an end in a test": "import os\ndef add(a, b): os._exit(0)",
}  # fmt: skip


# Programs that want to stay.
STAYING = {
    "a process of its own": "if os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork() == 0: time.sleep(99)",
    "a process by clone": "if C.syscall(CLONE, 17, 0, 0, 0, 0) == 0: time.sleep(99)",
    "signals ignored": "for s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nC.prctl(1, 0, 0, 0, 0)\ntime.sleep(99)",
    "threads": "import threading\nwhile 1: threading.Thread(target=time.sleep, args=(99,)).start()",
}  # fmt: skip


BOMBS = {
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
    "disk": ("for n in range(999):\n    open(str(n), 'wb').write(bytes(1 << 18))", "OSError"),
    "folders": ("for n in range(999):\n    os.mkdir('d')\n    os.chdir('d')", "OSError"),
    "one file": ("open('f', 'wb').write(bytes(99 << 20))", "OSError"),
    "processes": ("while True: os.fork()", "PermissionError"),
    "threads": ("import threading, time\nwhile True:\n"
    "    threading.Thread(target=time.sleep, args=(0.2,)).start()", "RuntimeError"),
    "open files": ("x = [os.pipe() for _ in range(99)]", "OSError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
}  # fmt: skip
