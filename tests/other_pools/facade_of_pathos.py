"""A pytest plug-in: with it, pathos' own tests get our pools in place of those of pathos."""

import pathos.multiprocessing
import pathos.pools
from facades import Pool

from datamat.parallel import PathosPool

pathos.pools.ProcessPool = pathos.multiprocessing.ProcessPool = PathosPool
pathos.pools._ProcessPool = Pool
