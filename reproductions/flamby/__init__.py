"""FLamby's heart disease benchmark: what fedhet's runs say beside its published table."""
