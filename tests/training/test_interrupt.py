"""A signal is answered at once, also where Python itself cannot."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

from agentjax.training.interrupt import Interrupt


def test_a_signal_is_told_of_while_the_main_thread_is_in_a_long_call():
  told: list[tuple[str, float]] = []
  handler, descriptor = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
  with Interrupt() as interrupt:
    interrupt.tell = lambda text: told.append((text, time.monotonic()))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    # As compiling does, it lets other threads run, and the handler only when it is done.
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 4_000_000)
    done = time.monotonic()
    assert interrupt.requested
  ((text, at),) = told
  assert text.startswith("SIGTERM: stops after") and at < done
  assert signal.getsignal(signal.SIGTERM) == handler
  assert signal.set_wakeup_fd(descriptor) == -1
  assert not any(thread.name == "signals" for thread in threading.enumerate())


_STUCK = """
import hashlib, os, signal, threading
from agentjax.training.interrupt import Interrupt
with Interrupt() as interrupt:
  interrupt.tell = lambda text: print(text, flush=True)
  for delay in (0.2, 0.6):
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
  hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000_000)
"""


def test_a_second_signal_ends_a_process_that_has_not_handled_the_first():
  done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, text=True, timeout=120)
  assert done.returncode == 128 + signal.SIGTERM and "SIGTERM: stops" in done.stdout, done.stderr
