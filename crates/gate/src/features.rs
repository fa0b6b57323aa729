//! The instructions of a request by function.

use crate::measurement::Measured;

/// Prints functions with `only` in their names that take at least so many instructions a request, the largest first.
pub fn print(measured: &Measured, least: f64, only: &str) {
    let each = measured.profile.by_function.iter();
    let each = each.map(|(name, count)| (*count as f64 / measured.requests as f64, name));
    let mut each: Vec<(f64, &String)> = each.filter(|(count, name)| *count >= least && name.contains(only)).collect();
    each.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    println!("{:>12}  function, with what it calls (of {} in all)", "instructions", measured.counts.instructions);
    for (count, name) in each {
        println!("{count:>12.1}  {name}");
    }
}
