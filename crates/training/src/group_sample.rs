//! A group with its measured time: predictors are trained and judged with such samples.

/// A group and its measured time.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSample {
    /// The features that the predictor sees.
    pub features: Vec<f32>,
    /// Milliseconds from its begin to its barrier.
    pub takes_ms: f64,
    /// The number of the group's set of models, among all sets.
    pub set: usize,
}

/// All sets of `count` of these model numbers, in their order.
pub fn sets_of(models: &[usize], count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let with = |(index, first): (usize, &usize)| {
        let rest = sets_of(&models[index + 1..], count - 1);
        rest.into_iter().map(|rest| [vec![*first], rest].concat()).collect::<Vec<_>>()
    };
    models.iter().enumerate().flat_map(with).collect()
}
