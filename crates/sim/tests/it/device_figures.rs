//! The papers' figures are made, with as many rows as there is to compare, and follow from their seed.

use downbeat_sim::device::{Figure, FigureOptions};

fn make(name: &str, requests: u64) -> Figure {
    Figure::make(name, &FigureOptions { requests, ..FigureOptions::default() }).unwrap()
}

fn number(figure: &Figure, row: usize, column: usize) -> f64 {
    figure.table[row][column].parse().unwrap()
}

#[test]
fn e2bird_figure_2_no_wait_is_fastest_at_low_load_and_static_slowest() {
    let figure = make("e2bird-2", 100);
    let row = |row| [2, 3, 4].map(|column| number(&figure, row, column));
    let [no_wait, opt_wait, fixed] = row(1);
    assert!(no_wait < opt_wait && opt_wait < fixed, "{figure}");
    let [no_wait, ..] = row(7);
    assert!(no_wait > 2.0 * number(&figure, 1, 2), "the load shows: {figure}");
    assert!(figure.page().contains("<svg"), "with a plot");
    assert_eq!(figure.to_string(), make("e2bird-2", 100).to_string());
}

#[test]
fn e2bird_table_1_has_every_row_of_the_paper() {
    assert_eq!(make("e2bird-table-1", 100).table.len(), 13);
}

#[test]
fn dvabatch_figure_21_stages_cost_one_request_little() {
    let figure = make("dvabatch-21", 100);
    for row in 1..=6 {
        let more = number(&figure, row, 3);
        // Launches deviate from run to run.
        assert!((-0.05..0.5).contains(&more), "{figure}");
    }
}

#[test]
fn a_figure_that_is_none_is_told_what_there_is() {
    let error = Figure::make("figure-99", &FigureOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("'figure-99' is no figure; there are "), "{text}");
    assert!(Figure::names().all(|(name, _)| text.contains(name)), "{text}");
}
