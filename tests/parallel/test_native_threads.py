"""Forks of a caller whose libraries have threads of their own."""

import subprocess
import sys

import pytest

PROGRAM = """
import cv2, numpy
picture = numpy.zeros((2000, 2000, 3), numpy.uint8)
cv2.setNumThreads(4)
for _ in range(5):
    cv2.GaussianBlur(picture, (31, 31), 5)  # OpenCV's pool has its threads now

from datamat.parallel import PathosExecutor

def blur(number):
    cv2.GaussianBlur(picture, (31, 31), 5)
    return number

for _ in range(2):
    with PathosExecutor(2, start_method="fork") as pool:
        print(list(pool.map(blur, range(4))), cv2.getNumThreads())
"""


@pytest.mark.slow
def test_caller_that_used_opencv_can_be_forked():
    """OpenCV waits for ever for threads that a fork has not; the caller's own setting is as before."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=True)

    assert found.stdout.splitlines() == ["[0, 1, 2, 3] 4"] * 2
