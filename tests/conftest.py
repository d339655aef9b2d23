"""One torch thread unless a test asks for more: toy ops are too short to share.

Set before torch is imported, so that processes which tests start inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

settings.register_profile("thorough", max_examples=1000)
settings.register_profile("short", max_examples=40)
