//! Abacus: which operators of which models run side by side, by prediction.
//!
//! [`Overlap`] is a state machine. It handles the arrival of requests and the end of groups. It
//! decides which operators of which requests run next ([`OverlapOutput::Run`]), and which requests
//! are answered or given up. A group begins together and ends in one barrier, so that its latency
//! can be predicted. The [`Predictor`] is learned ([`LearnedPredictor`]), or is the emulated device
//! itself, or knows nothing ([`Unpredicted`]).
//!
//! An operator is coarse, as in the paper (18 for ResNet50, 12 for BERT): a segment of a model that
//! was cut.
//!
//! | file | rule | source |
//! |---|---|---|
//! | [`FeatureLayout`] | the numbers that describe a group to a predictor | Abacus §5.3, figure 8 |
//! | [`Mlp`] | three hidden layers of 32 | §5.5 |
//! | [`multi_way`] | the largest group that fits, with several tries in one pass of the predictor | §6.3 |
//! | [`GroupSearch`] | all operators of the most urgent request, then of others while it keeps its deadline | §6.2, figure 12 |
//! | [`ErrorMargin`] | the factors for predictions, from the latencies of earlier groups | ours |
//! | [`GroupOrder`] | the baselines: one request at a time, first come, shortest or earliest deadline first | §7.1 |
//! | [`Overlap`] | headroom, drops, the next group while one runs | §6.2, §6.3, equations 2 and 3 |

mod controller;
mod features;
mod group;
mod learned;
mod margin;
mod mlp;
mod multi_way;
mod order;
mod predictor;
mod search;
mod settings;
mod waiting;

pub use controller::{Overlap, OverlapOptions, OverlapOutput, OverlapStats};
pub use features::{FeatureLayout, FeatureModel};
pub use group::{GroupId, GroupPart, OperatorGroup};
pub use learned::LearnedPredictor;
pub use margin::{ErrorMargin, Margins};
pub use mlp::{BadMlp, Layer, Mlp};
pub use multi_way::multi_way;
pub use order::{GroupOrder, UnknownGroupOrder};
pub use predictor::{Predictor, Unpredicted};
pub use search::{Found, GroupSearch};
pub use settings::{GroupSettings, GroupStats};
pub use waiting::OverlapModel;
