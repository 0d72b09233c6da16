from tests.gloo.test_megatron import test_in_every_layout_an_engine_is_asked_for_all_of_its_experts

CASES = "probed-.*"
