//! The shape of a pipeline: which step waits for which others.

/// One step's place in the graph.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepShape {
    /// The steps that must be done first, by number.
    pub after: Vec<usize>,
}

/// The graph of a pipeline: each step with the steps that it waits for. A shape has at least one
/// step and no circle.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    steps: Vec<StepShape>,
    /// By step: the steps that wait for it.
    before: Vec<Vec<usize>>,
    /// All steps, each one after those that it waits for; the lower number first.
    order: Vec<usize>,
}

/// Why lists of steps are no pipeline.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShapeError {
    /// There is no step.
    #[error("a pipeline needs at least one step")]
    Empty,
    /// A step waits for a step that does not exist.
    #[error("step {step} waits for step {after}, but there are only {steps} steps, counted from 0")]
    Unknown {
        /// The step that waits.
        step: usize,
        /// The step that does not exist.
        after: usize,
        /// Number of steps.
        steps: usize,
    },
    /// The second step waits for the first, and so on; the first waits for the last. The first is the
    /// smallest.
    #[error("steps {0:?} wait for each other")]
    Circle(Vec<usize>),
}

impl Shape {
    /// The pipeline whose step `i` waits for the steps `after[i]`. A step may be named twice.
    ///
    /// # Errors
    /// If there is no step, if a named step does not exist, or if steps form a circle.
    pub fn new(after: Vec<Vec<usize>>) -> Result<Shape, ShapeError> {
        let steps = after.len();
        if steps == 0 {
            return Err(ShapeError::Empty);
        }
        let mut before = vec![Vec::new(); steps];
        let mut sorted = Vec::with_capacity(steps);
        for (step, mut after) in after.into_iter().enumerate() {
            after.sort_unstable();
            after.dedup();
            for &first in &after {
                let waiting = before.get_mut(first).ok_or(ShapeError::Unknown { step, after: first, steps })?;
                waiting.push(step);
            }
            sorted.push(StepShape { after });
        }
        let order = order(&sorted, &before)?;
        Ok(Shape { steps: sorted, before, order })
    }

    /// A chain: each step waits for the one before. 0 is taken as 1.
    pub fn chain(steps: usize) -> Shape {
        let after = (0..steps.max(1)).map(|step| step.checked_sub(1).into_iter().collect());
        Shape::new(after.collect()).expect("a chain has no circle")
    }

    /// Number of steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Never: a pipeline has a step.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The steps, by number.
    pub fn steps(&self) -> &[StepShape] {
        &self.steps
    }

    /// The steps that wait for `step`.
    pub fn next(&self, step: usize) -> &[usize] {
        &self.before[step]
    }

    /// All steps, each one after those that it waits for.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The steps that wait for no other.
    pub fn first(&self) -> impl Iterator<Item = usize> + '_ {
        self.order.iter().copied().filter(|step| self.steps[*step].after.is_empty())
    }

    /// By step: the longest path from the end of that step to the end of the pipeline, if each step
    /// has this length.
    pub fn rest<T: Copy + Default + PartialOrd + std::ops::Add<Output = T>>(&self, lengths: &[T]) -> Vec<T> {
        assert_eq!(lengths.len(), self.len(), "each step has one length");
        let mut rest = vec![T::default(); self.len()];
        for &step in self.order.iter().rev() {
            for &next in &self.before[step] {
                let path = lengths[next] + rest[next];
                if path > rest[step] {
                    rest[step] = path;
                }
            }
        }
        rest
    }
}

fn order(steps: &[StepShape], before: &[Vec<usize>]) -> Result<Vec<usize>, ShapeError> {
    let mut missing: Vec<usize> = steps.iter().map(|step| step.after.len()).collect();
    let mut order: Vec<usize> = (0..steps.len()).filter(|step| missing[*step] == 0).collect();
    let mut seen = 0;
    while let Some(&step) = order.get(seen) {
        seen += 1;
        for &next in &before[step] {
            missing[next] -= 1;
            if missing[next] == 0 {
                order.push(next);
            }
        }
    }
    match missing.iter().position(|missing| *missing > 0) {
        Some(stuck) => Err(ShapeError::Circle(circle(steps, &missing, stuck))),
        None => Ok(order),
    }
}

/// The circle behind a step that never starts. Each such step waits for another one (`missing`), so
/// that the way back comes to a step that was seen before.
fn circle(steps: &[StepShape], missing: &[usize], stuck: usize) -> Vec<usize> {
    let mut path = vec![stuck];
    while let Some(earlier) = steps[path[path.len() - 1]].after.iter().copied().find(|step| missing[*step] > 0) {
        if let Some(start) = path.iter().position(|step| *step == earlier) {
            path.drain(..start);
            break;
        }
        path.push(earlier);
    }
    path.reverse();
    let least = path.iter().enumerate().min_by_key(|(_, step)| **step).map_or(0, |(at, _)| at);
    path.rotate_left(least);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_named() {
        assert_eq!(Shape::new(vec![]), Err(ShapeError::Empty));
        assert_eq!(Shape::new(vec![vec![1]]), Err(ShapeError::Unknown { step: 0, after: 1, steps: 1 }));
        assert_eq!(Shape::new(vec![vec![], vec![2], vec![1]]), Err(ShapeError::Circle(vec![1, 2])));
        assert_eq!(Shape::new(vec![vec![0]]), Err(ShapeError::Circle(vec![0])));
    }

    #[test]
    fn steps_come_after_what_they_wait_for() {
        let shape = Shape::new(vec![vec![3, 3], vec![], vec![0, 1], vec![1]]).unwrap();
        assert_eq!(shape.order(), [1, 3, 0, 2]);
        assert_eq!(shape.first().collect::<Vec<_>>(), [1]);
        assert_eq!(shape.next(1), [2, 3]);
        assert_eq!(shape.steps()[0].after, [3], "a step that is named twice is waited for once");
        assert_eq!(shape.rest(&[5, 1, 2, 4]), [2, 11, 0, 7]);
    }
}
