//! Prints whether the rows of models depend on each other, a line for each file: `rows FILE...`, or
//! the files' names by line on the standard input if there are no arguments. Columns, by tabs:
//! file, verdict, operator, node, reason, random operators.

use std::io::BufRead;
use std::path::Path;

use downbeat_engine::{Rows, row_report};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let lines = std::io::stdin().lock().lines().map_while(Result::ok);
    let files: Box<dyn Iterator<Item = String>> =
        if arguments.is_empty() { Box::new(lines) } else { Box::new(arguments.into_iter()) };
    for file in files {
        let columns = match row_report(Path::new(&file)) {
            Err(error) => vec!["error".into(), String::new(), String::new(), error.to_string()],
            Ok(report) => {
                let (verdict, cause) = match report.rows {
                    Rows::Independent => ("independent", None),
                    Rows::Mixed(cause) => ("mixed", Some(cause)),
                    Rows::Unknown(cause) => ("unknown", Some(cause)),
                };
                let [operator, node, reason] =
                    cause.map_or_else(Default::default, |cause| [cause.operator, cause.node, cause.reason]);
                vec![verdict.into(), operator, node, reason, report.random.join(" ")]
            }
        };
        println!("{file}\t{}", columns.join("\t"));
    }
}
