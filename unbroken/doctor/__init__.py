"""Is this host, and a run folder's place, fit for a run? `look` measures, `checks` judges (pure), `examine` puts both together."""
