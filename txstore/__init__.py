"""txstore: transactional checkpoint storage for PyTorch training.

`import txstore` loads neither torch nor a cloud SDK. The DCP pair is in `txstore.dcp`.
"""

from txstore.registry import open_store
from txstore.store import Store

__all__ = ["Store", "__version__", "open_store"]

__version__ = "0.1.0"
