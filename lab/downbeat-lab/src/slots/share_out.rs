//! The division of the slots of each kind among models that serves the highest multiple of all
//! rates: a small linear program.

/// The best division of slots of several kinds among several models.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Shares {
    /// The multiple of all rates that can be served.
    pub factor: f64,
    /// By model, by kind: the slots of that kind that the model keeps busy.
    pub slots: Vec<Vec<f64>>,
    /// By kind: the rise of `factor` with one slot more.
    pub prices: Vec<f64>,
}

/// Numbers up to this size count as zero, because of rounding.
const TINY: f64 = 1e-9;
/// A bound on exchanges. A program of this size only reaches it through rounding.
const MOST_PIVOTS: usize = 10_000;

/// Maximises the factor `f` for which there are `x[m][k] >= 0` with `sum_m x[m][k] <= slots[k]` and
/// `sum_k x[m][k] / costs[m][k] >= f * rates[m]`. `costs` are the slots that a request a second of
/// a model keeps busy, infinite where it cannot run. Returns `None` if a model can run nowhere. The
/// simplex method starts from `x = 0`, which is feasible. Bland's rule makes it end.
pub(crate) fn share_out(rates: &[f64], costs: &[Vec<f64>], slots: &[u32]) -> Option<Shares> {
    let (models, kinds) = (rates.len(), slots.len());
    let pairs: Vec<(usize, usize)> = (0..models)
        .flat_map(|model| (0..kinds).map(move |kind| (model, kind)))
        .filter(|(model, kind)| slots[*kind] > 0 && rates[*model] > 0.0 && costs[*model][*kind].is_finite())
        .collect();
    if (0..models).any(|model| rates[model] > 0.0 && !pairs.iter().any(|(of, _)| *of == model)) {
        return None;
    }
    // The multiple of a model's rate that one slot serves, in a unit in which the largest is 1.
    let serves = |model: usize, kind: usize| 1.0 / (costs[model][kind] * rates[model]);
    let unit = pairs.iter().map(|(model, kind)| serves(*model, *kind)).fold(0.0, f64::max);
    // Columns: the pairs, f, a slack for each row, the right side. Rows: kinds, then models, then
    // the gain of each column.
    let (gain, width) = (kinds + models, pairs.len() + 1 + kinds + models + 1);
    let (factor, right) = (pairs.len(), width - 1);
    let mut table = vec![vec![0.0; width]; gain + 1];
    for (column, (model, kind)) in pairs.iter().enumerate() {
        table[*kind][column] = 1.0;
        table[kinds + model][column] = -serves(*model, *kind) / unit;
    }
    for (row, count) in slots.iter().enumerate() {
        table[row][right] = f64::from(*count);
    }
    for (model, rate) in rates.iter().enumerate() {
        table[kinds + model][factor] = if *rate > 0.0 { 1.0 } else { 0.0 };
    }
    for (row, line) in table.iter_mut().enumerate().take(gain) {
        line[factor + 1 + row] = 1.0;
    }
    table[gain][factor] = 1.0;
    let mut basis: Vec<usize> = (0..gain).map(|row| factor + 1 + row).collect();
    for _ in 0..MOST_PIVOTS {
        let Some(column) = (0..right).find(|column| table[gain][*column] > TINY) else { break };
        let ratio = |row: usize| table[row][right] / table[row][column];
        let leaves = (0..gain).filter(|row| table[*row][column] > TINY);
        let row = leaves.min_by(|a, b| ratio(*a).total_cmp(&ratio(*b)).then(basis[*a].cmp(&basis[*b])))?;
        pivot(&mut table, row, column);
        basis[row] = column;
    }
    let mut found = Shares { factor: 0.0, slots: vec![vec![0.0; kinds]; models], prices: Vec::new() };
    for (row, column) in basis.into_iter().enumerate() {
        match pairs.get(column) {
            Some((model, kind)) => found.slots[*model][*kind] = table[row][right],
            None if column == factor => found.factor = table[row][right] * unit,
            None => {}
        }
    }
    found.prices = (0..kinds).map(|kind| (-table[gain][factor + 1 + kind] * unit).max(0.0)).collect();
    Some(found)
}

/// Turns the column into a unit vector with its one in `row`.
fn pivot(table: &mut [Vec<f64>], row: usize, column: usize) {
    let by = table[row][column];
    table[row].iter_mut().for_each(|value| *value /= by);
    let line = table[row].clone();
    for (index, other) in table.iter_mut().enumerate() {
        let times = other[column];
        if index != row && times != 0.0 {
            other.iter_mut().zip(&line).for_each(|(value, of)| *value -= times * of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_goes_where_it_costs_least_beside_the_others() {
        // The first model is twice as fast on the first kind, the second as fast on both. At most
        // 1/1 and 1/1 a second are held.
        let costs = [vec![1.0, 2.0], vec![1.0, 1.0]];
        let found = share_out(&[1.0, 1.0], &costs, &[1, 1]).unwrap();
        assert!((found.factor - 1.0).abs() < 1e-9, "{found:?}");
        assert!((found.slots[0][0] - 1.0).abs() < 1e-9 && (found.slots[1][1] - 1.0).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn prices_say_what_a_slot_more_brings() {
        let costs = [vec![0.5, 1.5], vec![2.0, 1.0], vec![1.0, 3.0]];
        let rates = [2.0, 1.0, 0.5];
        let found = share_out(&rates, &costs, &[3, 4]).unwrap();
        let more = share_out(&rates, &costs, &[4, 4]).unwrap();
        assert!((more.factor - found.factor - found.prices[0]).abs() < 1e-9, "{found:?} {more:?}");
        // Duality: all slots at their prices are the factor.
        let paid = 3.0 * found.prices[0] + 4.0 * found.prices[1];
        assert!((paid - found.factor).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn a_model_that_can_run_nowhere_is_none() {
        assert_eq!(share_out(&[1.0], &[vec![f64::INFINITY, 1.0]], &[1, 0]), None);
        assert_eq!(share_out(&[1.0], &[vec![f64::INFINITY, 1.0]], &[1, 1]).unwrap().factor, 1.0);
    }
}
