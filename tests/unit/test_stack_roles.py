from deploy.stack.roles import locked_role, locked_roles


def test_a_roles_arguments_are_the_commands_the_extra_ones_and_the_launchers() -> None:
    found = locked_role("decode", ["decode", "--port=1"], {"EXTRA_ARGUMENTS": "--a 'b c'", "X": "1"})
    assert found.arguments == ("decode", "--port=1", "--a", "b c", "--disaggregation-mode=decode")
    assert found.environment == {"EXTRA_ARGUMENTS": "--a 'b c'", "X": "1"}


def test_the_hash_follows_arguments_and_environment_and_not_the_order_of_variables() -> None:
    one = locked_role("router", ["router"], {"A": "1", "B": "2"})
    assert locked_role("router", ["router"], {"B": "2", "A": "1"}) == one
    assert locked_role("router", ["router"], {"A": "1", "B": "3"}).sha256 != one.sha256
    assert locked_role("router", ["router", "--x"], {"A": "1", "B": "2"}).sha256 != one.sha256


def test_extra_arguments_that_the_launcher_will_refuse_are_still_shown() -> None:
    assert locked_role("router", ["router"], {"EXTRA_ARGUMENTS": "--a 'b"}).arguments == ("router", "--a 'b")


def test_composes_escaping_is_undone_and_a_variable_without_value_is_empty() -> None:
    config = {"services": {"router": {"command": ["router", "--a=$$X"], "environment": {"B": "$$", "C": None, "D": 1}}}}
    (role,) = locked_roles(config).values()
    assert role.arguments == ("router", "--a=$X")
    assert role.environment == {"B": "$", "C": "", "D": "1"}


def test_a_service_without_command_is_a_role_too() -> None:
    assert locked_roles({"services": {"namespaces": {"command": None}}})["namespaces"].arguments == ()
