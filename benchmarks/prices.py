"""Published limits and list prices of the services, and what a number of requests means there.

Limits: Amazon S3 documents 3,500 writes and 5,500 reads a second for each partitioned prefix; Google Cloud Storage
begins at 1,000 writes and 5,000 reads a second for a bucket and grows when the rate does; an Azure account takes 20,000
requests a second in most regions. A store that is spread over prefixes (`txstore init --spread`) has the limit of a
prefix so many times, once S3 has divided there.

Prices are in US dollars, without tax or discount, from each provider's public price list of 2025: Amazon S3 Standard in
Northern Virginia, Cloud Storage Standard in Iowa (operations of class A and B), Azure Blob Storage, hot tier, locally
redundant, in East US. Look them up before a decision rests on them. Storage itself and traffic are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Requests:
    """How many of each kind; listings are billed as writes."""

    writes: int
    reads: int
    lists: int


@dataclass(frozen=True)
class Service:
    """One service.

    Attributes:
        part_bytes: What one request of an upload carries; None for a whole file, as on Cloud Storage.
        around: Requests around the parts of a file: the begin and the completion of an upload, or a block list.
        writes_per_s: What one prefix (S3), bucket (GCS) or account (Azure) takes.
        reads_per_s: The same, of reads.
        write_usd: Price of a million writes or listings.
        read_usd: Price of a million reads.
    """

    name: str
    part_bytes: int | None
    around: int
    writes_per_s: int
    reads_per_s: int
    write_usd: float
    read_usd: float

    def uploads(self, sizes: list[int]) -> int:
        """Requests that upload files of these sizes, as the backend sends them."""
        if self.part_bytes is None:
            return len(sizes)
        parts = [-(-size // self.part_bytes) for size in sizes]
        return sum(count + self.around if count > 1 else 1 for count in parts)

    def estimate(self, save: Requests, load: Requests, ranks: int) -> dict[str, Any]:
        """Requests, the least time that the limits allow them to take, and what they cost."""

        def least_s(requests: Requests) -> float:
            return requests.writes / self.writes_per_s + (requests.reads + requests.lists) / self.reads_per_s

        def price(requests: Requests) -> float:
            return ((requests.writes + requests.lists) * self.write_usd + requests.reads * self.read_usd) / 1e6

        return {
            "name": self.name,
            "ranks": ranks,
            "save_requests": save.writes + save.reads + save.lists,
            "save_s": least_s(save),
            "save_usd": price(save),
            "load_requests": load.writes + load.reads + load.lists,
            "load_s": least_s(load),
            "load_usd": price(load),
        }


SERVICES = (
    Service("Amazon S3", 32 << 20, 2, 3_500, 5_500, 5.0, 0.4),
    Service("Amazon S3, spread 16", 32 << 20, 2, 16 * 3_500, 16 * 5_500, 5.0, 0.4),
    Service("Google Cloud Storage", None, 0, 1_000, 5_000, 5.0, 0.4),
    Service("Azure Blob Storage", 32 << 20, 1, 20_000, 20_000, 5.5, 0.44),
)
