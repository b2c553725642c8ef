"""What the groups of a mesh are asked for."""


def note_requests(monkeypatch, runtime):
    """The requests of each call of ``ask`` from now on, by group."""
    noted, ask = [], runtime.ask

    def note(requests):
        noted.append(dict(requests))
        return ask(requests)

    monkeypatch.setattr(runtime, "ask", note)
    return noted
