"""The models of an endpoint, by name; they can be changed while requests come in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from orchestray.serving.models.errors import UnknownModelError
from orchestray.serving.routing.endpoint import Endpoint, ModelVersion, Share


class Registry:
    """The models of an endpoint by name.

    It belongs to one event loop: `update` changes everything between two requests, never within one.
    """

    def __init__(self, models: Mapping[str, Sequence[Share]] | None = None) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self.ready = False
        """True if requests are accepted: everything is loaded and warm, and the endpoint is not about to end.

        A version whose replicas were lost later reports that itself (`ModelVersion.is_deserted`).
        """
        if models:
            self.update(models)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    def __len__(self) -> int:
        return len(self._endpoints)

    def __contains__(self, name: object) -> bool:
        return name in self._endpoints

    def __getitem__(self, name: str) -> Endpoint:
        """Return the model of that name.

        Raises:
            UnknownModelError: there is none.
        """
        try:
            return self._endpoints[name]
        except KeyError:
            close = get_close_matches(name, self._endpoints, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(self._endpoints) or 'none'}."
            raise UnknownModelError(f"There is no model {name}; {hint}") from None

    @property
    def default(self) -> Endpoint:
        """First model, which answers requests without a name.

        Raises:
            UnknownModelError: nothing is served yet.
        """
        for endpoint in self._endpoints.values():
            return endpoint
        raise UnknownModelError("There is no model yet.")

    @property
    def versions(self) -> list[ModelVersion]:
        """Every version of every model."""
        return [version for endpoint in self for version in endpoint.versions]

    @property
    def uncopied(self) -> list[str]:
        """Clauses of `Endpoint.uncopied` of every model."""
        return [clause for endpoint in self for clause in endpoint.uncopied]

    def update(self, models: Mapping[str, Sequence[Share]]) -> list[ModelVersion]:
        """Serve exactly these models, from the next request on.

        Returns:
            the versions that get no more requests; the caller must close them, which answers the requests that they
            have.
        """
        before = self.versions
        endpoints = {}
        for name, shares in models.items():
            endpoint = self._endpoints.get(name)
            if endpoint is None:
                endpoint = Endpoint(name, shares)
            else:
                endpoint.set_shares(shares)
            endpoints[name] = endpoint
        self._endpoints = endpoints
        self.ready = True
        now = {id(version) for version in self.versions}
        return [version for version in before if id(version) not in now]

    async def close(self, *, drain: bool = True) -> None:
        """Answer waiting requests (`drain`), and end every version, even if another fails to end."""
        self.ready = False
        closing = (version.close(drain=drain) for version in self.versions)
        failures = [each for each in await asyncio.gather(*closing, return_exceptions=True) if each is not None]
        if failures:
            raise failures[0]
