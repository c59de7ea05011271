"""Config of a server process that can be restarted, and whose workers join and leave."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.extensions.servers.ps.server_config import ServerConfig


@dataclass(frozen=True)
class ElasticConfig:
    """Config that an elastic server has in addition to the config of other servers.

    `folder` is shared by all hosts, and has the files for the next incarnation. `incarnation` is 1 at first,
    and one more after each restart. With `resumes_saved_state` the servers resume from their saved state,
    which they write every `save_interval_s` seconds. The run ends early when an epoch reaches `target_score`.
    """

    folder: str
    incarnation: int = 1
    resumes_saved_state: bool = False
    save_interval_s: float = 60.0
    target_score: float | None = None
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True)
class ElasticServerConfig(ServerConfig):
    """The complete config of an elastic server process."""

    elastic: ElasticConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.elastic, dict):  # the config was read from JSON
            object.__setattr__(self, "elastic", ElasticConfig(**self.elastic))
