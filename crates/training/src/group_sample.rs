//! A group with what it takes: what a predictor is trained and judged with.

/// A group and what it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSample {
    /// As the predictor sees it.
    pub features: Vec<f32>,
    /// Milliseconds from its begin to its barrier.
    pub takes_ms: f64,
    /// Which of the sets of models that there are it is of.
    pub set: usize,
}

/// All sets of `count` of these models, which are numbers, in their order.
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
