"""Config of a server process whose workers come and go."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.extensions.servers.ps.server_config import ServerConfig


@dataclass(frozen=True)
class ElasticConfig:
    """Config of such a server in addition to a gang's.

    `folder`: where all incarnations of the servers store what the next one needs; all hosts see it.
    `incarnation`: 1, and one more for each restart. With `resumes` they resume from their saved state, which
    they write every `save_every_s`. The run is over before its last ticket when an epoch reaches
    `target_score`.
    """

    folder: str
    incarnation: int = 1
    resumes: bool = False
    save_every_s: float = 60.0
    target_score: float | None = None
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True)
class ElasticServerConfig(ServerConfig):
    """A `ServerConfig` with its elastic part."""

    elastic: ElasticConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.elastic, dict):  # it has come as JSON
            object.__setattr__(self, "elastic", ElasticConfig(**self.elastic))
