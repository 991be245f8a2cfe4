"""Files of results are fit to be published."""

from lib import results


def test_results_name_no_folder_of_the_machine_that_measured():
    for file in (results.ROOT / "bench" / "results").glob("*.json"):
        assert 'File \\"/' not in file.read_text(), file
