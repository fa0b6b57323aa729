//! The instructions of a request, by function.

use std::collections::BTreeMap;

use crate::gate::measurement::Measured;

/// The functions to print.
#[derive(clap::Args)]
pub struct Choice {
    /// Leave out functions with fewer instructions a request, their callees included.
    #[arg(long, default_value_t = 50.0)]
    least: f64,
    /// Only functions whose names contain this text.
    #[arg(long, default_value = "downbeat")]
    only: String,
    /// Print the callers of functions with this in their names, and how often each calls in a
    /// request. `clock_gettime` shows the callers that read a clock.
    #[arg(long)]
    callers: Option<String>,
}

/// Prints the functions, the largest first.
pub fn print(measured: &Measured, choice: &Choice) {
    let Measured { requests, counts, profile, atomics, system_calls } = measured;
    let each = |count: i64| count as f64 / *requests as f64;
    if let Some(part) = &choice.callers {
        let called = profile.calls.iter().filter(|(name, _)| name.contains(part));
        for (name, callers) in called {
            print_sorted(&format!("calls of {name}"), callers.iter().map(|(caller, n)| (each(*n), caller.as_str())));
        }
        return;
    }
    let by_function = profile.by_function.iter().map(|(name, count)| (each(*count), name.as_str()));
    let chosen = by_function.filter(|(count, name)| *count >= choice.least && name.contains(&choice.only));
    print_sorted(&format!("instructions, with what is called, of {}", counts.instructions), chosen);
    for (title, only_locks) in [("locks", true), ("atomics", false)] {
        let mut by_function: BTreeMap<&str, i64> = BTreeMap::new();
        for atomic in atomics.iter().filter(|atomic| atomic.is_lock || !only_locks) {
            *by_function.entry(&atomic.function).or_default() += atomic.count;
        }
        print_sorted(title, by_function.into_iter().map(|(name, count)| (each(count), name)));
    }
    print_sorted("system calls", system_calls.iter().map(|(name, count)| (each(*count), name.as_str())));
}

fn print_sorted<'a>(title: &str, each: impl Iterator<Item = (f64, &'a str)>) {
    let mut each: Vec<(f64, &str)> = each.filter(|(count, _)| *count >= 0.01).collect();
    each.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    println!("{title}");
    each.iter().for_each(|(count, name)| println!("{count:>12.2}  {name}"));
}
