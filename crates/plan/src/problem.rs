//! The problem that the partitioner solves: models, sub-clusters and limits.

/// A model as the partitioner sees it.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// The model's name, for messages.
    pub name: String,
    /// `r`: the rate that is divided evenly: requests per second, or the devices that these keep busy.
    pub rate: f64,
    /// Requests per second, for [`Problem::max_rate`]. In the appendix it is `rate`.
    pub requests: f64,
    /// `s`: bytes that a loaded model takes on every device of its sub-cluster (weights).
    pub static_memory: u64,
    /// `d`: bytes that the model takes while it runs (activations). A device runs one batch at a
    /// time, so only the largest of a sub-cluster counts; see [`Problem::runs`].
    pub dynamic_memory: u64,
    /// `c`: the cost of loading the model, and of unloading it, in units of the caller's choice
    /// (seconds, bytes, or 1).
    pub load_cost: f64,
    /// Sub-clusters whose devices all have the model already, so that loading it there costs nothing.
    pub loaded_in: Vec<usize>,
    /// `x'`: the sub-cluster where the model runs now; `None`: nowhere.
    pub running: Option<usize>,
}

impl Model {
    /// The cost of having the model on `sub_cluster`, starting from where it runs now: nothing, one
    /// load, or an unload and a load (`sum_j c_ij |x_ij - x'_ij|`). A sub-cluster that no longer
    /// exists counts as a place to unload from.
    pub fn move_cost(&self, sub_cluster: usize) -> f64 {
        let load = if self.loaded_in.contains(&sub_cluster) { 0.0 } else { self.load_cost };
        match self.running {
            None => load,
            Some(now) if now == sub_cluster => 0.0,
            Some(_) => self.load_cost + load,
        }
    }
}

/// Models, the number of sub-clusters to divide them among, and the limits (Symphony §4.4, appendix
/// A).
///
/// ```
/// use downbeat_plan::{Method, Model, Options, Problem, plan};
/// use downbeat_core::Duration;
///
/// let model = |name: &str, rate| Model {
///     name: name.to_owned(), rate, requests: rate, static_memory: 1 << 30, dynamic_memory: 0, load_cost: 1.0,
///     loaded_in: vec![], running: None,
/// };
/// let problem = Problem {
///     models: vec![model("a", 300.0), model("b", 200.0), model("c", 100.0)],
///     sub_clusters: 2, max_rate: None, max_memory: None, runs: None, memory_weight: 0.0, max_disruption: None,
/// };
/// let options = Options { time_limit: Duration::from_millis(1_000), seed: 1, method: Method::Search };
/// // So small a problem needs no clock. For others the caller tells how much time has elapsed.
/// let plan = plan(&problem, &options, &|| Duration::ZERO)?;
/// // `a` alone has as many requests as `b` and `c` together.
/// assert!(plan.proved);
/// assert_eq!(plan.evaluation.objective, 0.0);
/// # Ok::<(), downbeat_plan::PlanError>(())
/// ```
///
/// The partitioner minimises `deltaR + w * deltaS`: the largest distance of a sub-cluster's request
/// rate, and of its static memory, from the average sub-cluster's. Both are shares of that average
/// here, so `memory_weight` has no unit, and at 1 both count the same. The appendix's `w` is
/// `memory_weight * Ravg / Savg`.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    /// The models.
    pub models: Vec<Model>,
    /// `l`: the number of sub-clusters.
    pub sub_clusters: usize,
    /// `Rmax`: most requests per second that a sub-cluster's dispatcher takes; `None`: any number.
    pub max_rate: Option<f64>,
    /// `Smax`: bytes of a device's memory; `None`: enough for everything.
    pub max_memory: Option<u64>,
    /// The most bytes that runs beside each other take: others wait. `None`: a device runs one batch at
    /// a time (appendix A).
    pub runs: Option<u64>,
    /// The weight of a share of memory imbalance relative to a share of rate imbalance.
    pub memory_weight: f64,
    /// `Cmax`: the highest allowed cost of leaving the running assignment, the sum of
    /// [`Model::move_cost`]; `None`: any cost.
    pub max_disruption: Option<f64>,
}

/// The first number of a problem that is out of range, in words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadProblem(String);

/// Most pairs of a model and a sub-cluster.
const MOST_PAIRS: usize = 1_000_000;

impl Problem {
    /// Checks that rates, costs and limits are finite and not negative, that names differ, and that
    /// the problem is neither empty nor too large.
    ///
    /// # Errors
    /// The first number or name that is wrong.
    pub fn check(&self) -> Result<(), BadProblem> {
        let wrong = |what: String| Err(BadProblem(what));
        let (models, sub_clusters) = (self.models.len(), self.sub_clusters);
        if models == 0 {
            return wrong("there are no models".to_owned());
        }
        if sub_clusters == 0 {
            return wrong("there are no sub-clusters: at least 1 is needed".to_owned());
        }
        if models.saturating_mul(sub_clusters) > MOST_PAIRS {
            return wrong(format!(
                "{models} models on {sub_clusters} sub-clusters are too many: at most {MOST_PAIRS} pairs of the two are supported"
            ));
        }
        let limits = [
            ("the largest rate of a sub-cluster".to_owned(), self.max_rate.unwrap_or(0.0)),
            ("the largest disruption".to_owned(), self.max_disruption.unwrap_or(0.0)),
            ("the weight of memory".to_owned(), self.memory_weight),
        ];
        let numbers = self.models.iter().flat_map(|model| {
            let of = |what: &str| format!("{what} of model '{}'", model.name);
            let requests = (of("the number of requests a second"), model.requests);
            [(of("the rate"), model.rate), requests, (of("the load cost"), model.load_cost)]
        });
        let is_bad = |value: f64| !(value >= 0.0 && value.is_finite());
        if let Some((what, value)) = limits.into_iter().chain(numbers).find(|(_, value)| is_bad(*value)) {
            return wrong(format!("{what} is {value}; the value must be a finite number and at least 0"));
        }
        let mut names: Vec<&str> = self.models.iter().map(|m| m.name.as_str()).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => wrong(format!("there are two models named '{}'", pair[0])),
            None => Ok(()),
        }
    }

    /// `Ravg`: the rate of the average sub-cluster.
    pub fn average_rate(&self) -> f64 {
        self.models.iter().map(|m| m.rate).sum::<f64>() / self.sub_clusters as f64
    }

    /// Requests per second of the average sub-cluster, as [`Problem::max_rate`] counts them.
    pub fn average_requests(&self) -> f64 {
        self.models.iter().map(|m| m.requests).sum::<f64>() / self.sub_clusters as f64
    }

    /// `Savg`: bytes of static memory of the average sub-cluster.
    pub fn average_memory(&self) -> f64 {
        self.models.iter().map(|m| m.static_memory as f64).sum::<f64>() / self.sub_clusters as f64
    }

    /// Bytes that the runs of models with these dynamic memories take at once.
    pub(crate) fn runs_at_once(&self, largest: u64, sum: u64) -> u64 {
        self.runs.map_or(largest, |most| largest.max(sum.min(most)))
    }

    /// Whether the cost of moves depends on the sub-clusters' numbers.
    pub(crate) fn costs_by_number(&self) -> bool {
        self.models.iter().any(|model| model.running.is_some() || !model.loaded_in.is_empty())
    }

    /// Whether at least one model runs somewhere already.
    pub fn has_running(&self) -> bool {
        self.models.iter().any(|m| m.running.is_some())
    }
}
