//! The backend of a cluster: the slots and models that it offers, and the models that it loads.

mod asked_requests;
pub(crate) mod backend_figures;
pub(crate) mod backend_offer;
pub(crate) mod backend_role;
pub(crate) mod definition;
pub(crate) mod model_loader;
pub(crate) mod slot_map;
