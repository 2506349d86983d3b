"""How a run is carried out: local workers, Ray, Flower's simulation, a deployment."""
