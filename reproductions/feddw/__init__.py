"""FedDW's figures 4, 7 and 8: classifier norms and class relations."""
