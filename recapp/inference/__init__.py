"""Score raw rows with a trained model: quantised and mapped tables, artefacts, no trainer."""
