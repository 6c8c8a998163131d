import pickle

from pefll.core.errors import Diverged, PefllError


def test_code_stands_behind_the_sentence_and_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(Diverged("it diverged; lower client_lr", code="PEFLL-T001")))
    assert type(error) is Diverged
    assert str(error) == "it diverged; lower client_lr [PEFLL-T001]"
    assert str(PefllError("no code yet")) == "no code yet"
