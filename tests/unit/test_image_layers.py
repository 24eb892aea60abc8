import json

from deploy.image.layers import parse_history


def test_only_steps_that_make_layers_have_a_size_even_an_empty_one() -> None:
    steps = [
        {"CreatedBy": "LABEL a=b", "Size": "0"},
        {"CreatedBy": "RUN |1 A=1 /bin/sh -c true # buildkit", "Size": "5"},
        {"CreatedBy": "ARG A", "Size": "0"},
        {"CreatedBy": "RUN /bin/sh -c patch # buildkit", "Size": "0"},
        {"CreatedBy": '/bin/sh -c #(nop) ENTRYPOINT ["x"]', "Size": "0"},
        {"CreatedBy": "WORKDIR /", "Size": "0"},
        {"CreatedBy": "COPY /out/ / # buildkit", "Size": "411556860"},
    ]
    assert parse_history("\n".join(map(json.dumps, steps)) + "\n") == [411556860, 0, 5]


def test_no_history_is_no_layers() -> None:
    assert parse_history("") == []
