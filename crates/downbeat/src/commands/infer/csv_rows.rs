//! The rows of a CSV file as inputs of a model.

use std::collections::BTreeSet;

use anyhow::{Context, anyhow, bail};
use downbeat_core::tensor::DataType;
use downbeat_protocol::InferTensor;
use downbeat_report::note;

use super::values::{Number, Values, push, push_text};
use super::wanted::{Wanted, WantedInput};

/// A CSV file: its header, if it has one, and its rows.
#[derive(Debug)]
pub struct CsvRows {
    /// The columns' names. Without a header: none.
    names: Vec<String>,
    rows: Vec<csv::StringRecord>,
    /// The number of the line before the first row.
    before: usize,
    shown: String,
}

impl CsvRows {
    /// Reads a file. The first row is the header, unless all its cells are numbers. Cells are divided by
    /// commas, or by tabs or semicolons if the first line has more of these.
    ///
    /// # Errors
    /// If a row has another number of cells than the first.
    pub fn read(text: &str, shown: &str) -> anyhow::Result<Self> {
        let first = text.lines().next().unwrap_or_default();
        let count = |divider: &u8| first.bytes().filter(|byte| byte == divider).count();
        let divider = *b",;\t".iter().rev().max_by_key(|divider| count(divider)).unwrap_or(&b',');
        let mut reader = csv::ReaderBuilder::new()
            .has_headers(false)
            .delimiter(divider)
            .trim(csv::Trim::All)
            .from_reader(text.as_bytes());
        let rows: Result<Vec<csv::StringRecord>, csv::Error> = reader.records().collect();
        let mut rows = rows.map_err(|error| anyhow!("{shown}: {}", fault(&error)))?;
        let is_header = rows.first().is_some_and(|row| row.iter().any(|cell| cell.parse::<f64>().is_err()));
        let names = if is_header { rows.remove(0).iter().map(str::to_owned).collect() } else { Vec::new() };
        if rows.is_empty() {
            bail!("{shown} has no rows{}", if is_header { " after its header" } else { "" });
        }
        Ok(CsvRows { names, rows, before: usize::from(is_header), shown: shown.to_owned() })
    }

    /// Makes the rows into inputs: a column fills the input of its name, columns `NAME.0`, `NAME.1` and
    /// so on fill the input NAME. If no column has such a name, all columns together fill the only
    /// input.
    ///
    /// # Errors
    /// If the columns do not fit the inputs.
    pub fn into_inputs(self, wanted: &Wanted) -> anyhow::Result<Vec<InferTensor>> {
        let mut used = BTreeSet::new();
        let mut inputs = Vec::new();
        for input in wanted.inputs.iter().chain(wanted.media.iter().map(|media| &media.input)) {
            let columns = self.columns(&input.name);
            if !columns.is_empty() {
                used.extend(columns.iter().copied());
                inputs.push(self.input(wanted, input, &columns)?);
            }
        }
        if !inputs.is_empty() {
            let names = self.names.iter().enumerate();
            let rest: Vec<&str> =
                names.filter(|(place, _)| !used.contains(place)).map(|(_, name)| name.as_str()).collect();
            if !rest.is_empty() {
                note(format_args!("{}: no input takes the columns {}; they are left out", self.shown, rest.join(", ")));
            }
            return Ok(inputs);
        }
        let text = wanted.media.as_ref().filter(|media| media.takes("text/")).map(|media| &media.input);
        let only = match text {
            Some(input) => input,
            None => wanted.only(&format!("{} has a header that", self.shown))?,
        };
        Ok(vec![self.into_input(wanted, only)?])
    }

    /// Makes all columns into one input. Their names do not matter.
    ///
    /// # Errors
    /// If the columns do not fit the input.
    pub fn into_input(self, wanted: &Wanted, input: &WantedInput) -> anyhow::Result<InferTensor> {
        let columns: Vec<usize> = (0..self.rows.first().map_or(0, csv::StringRecord::len)).collect();
        self.input(wanted, input, &columns)
    }

    /// The columns of an input.
    fn columns(&self, name: &str) -> Vec<usize> {
        if let Some(place) = self.names.iter().position(|column| column == name) {
            return vec![place];
        }
        let numbered = |place: usize| self.names.iter().position(|column| *column == format!("{name}.{place}"));
        (0..).map_while(numbered).collect()
    }

    fn input(&self, wanted: &Wanted, input: &WantedInput, columns: &[usize]) -> anyhow::Result<InferTensor> {
        let mut data = Vec::new();
        for (place, row) in self.rows.iter().enumerate() {
            for column in columns {
                let cell = row.get(*column).unwrap_or_default();
                self.push_cell(&mut data, input.datatype, cell).with_context(|| {
                    let name =
                        self.names.get(*column).map_or_else(|| (column + 1).to_string(), |name| format!("'{name}'"));
                    let row = place + 1 + self.before;
                    format!("{}: row {row}, column {name}: input '{}' wants {}", self.shown, input.name, input.form())
                })?;
            }
        }
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let shape = vec![count(self.rows.len()), count(columns.len())];
        Values { datatype: input.datatype, shape, data }.into_input(wanted, input, &self.shown)
    }

    fn push_cell(&self, data: &mut Vec<u8>, datatype: DataType, cell: &str) -> anyhow::Result<()> {
        if datatype == DataType::Bytes {
            return push_text(data, cell.as_bytes());
        }
        let number = match cell {
            "true" | "True" | "TRUE" => Some(Number::Integer(1)),
            "false" | "False" | "FALSE" => Some(Number::Integer(0)),
            // A missing value, as pandas writes it.
            "" if datatype.is_float() => Some(Number::Float(f64::NAN)),
            _ if datatype.is_float() => cell.parse().ok().map(Number::Float),
            _ => cell.parse().ok().or_else(|| whole(cell)).map(Number::Integer),
        };
        let number = number.with_context(|| format!("'{}' is no such number", shortened(cell)))?;
        push(data, datatype, number).with_context(|| format!("'{}' is out of its range", shortened(cell)))
    }
}

/// A whole number that is written with a point, as pandas writes a column of integers with gaps.
fn whole(cell: &str) -> Option<i128> {
    let value: f64 = cell.parse().ok()?;
    (value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0).then_some(value as i128)
}

fn shortened(cell: &str) -> String {
    cell.chars().take(40).collect()
}

fn fault(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let line = pos.as_ref().map_or(0, csv::Position::line);
            format!("line {line} has {len} cells, but the first line has {expected_len}")
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, inputs: &[(&str, DataType, &[i64])]) -> anyhow::Result<Vec<InferTensor>> {
        CsvRows::read(text, "a.csv")?.into_inputs(&Wanted::of(inputs))
    }

    #[test]
    fn columns_fill_the_inputs_of_their_names() {
        let inputs = [
            ("age", DataType::Int64, &[-1, 1][..]),
            ("town", DataType::Bytes, &[-1, 1]),
            ("v", DataType::Fp32, &[-1, 2]),
        ];
        let read = read("town,label,v.0,v.1,age\nBonn,1,0.5,1,30\n\"Ulm, Donau\",0,,2,41.0\n", &inputs).unwrap();
        assert_eq!(
            read.iter().map(|t| (t.name.as_str(), t.shape.clone())).collect::<Vec<_>>(),
            [("age", vec![2, 1]), ("town", vec![2, 1]), ("v", vec![2, 2])]
        );
        assert_eq!(read[0].data[8], 41);
        assert!(read[1].data.ends_with(b"Ulm, Donau"));
    }

    #[test]
    fn all_columns_together_fill_the_only_input() {
        let one = [("x", DataType::Fp32, &[-1, 3][..])];
        for text in ["1,2,3\n4,5,6\n", "a;b;c\n1;2;3\n4;5;6\n", "a\tb\tc\r\n1\t2\t3\r\n4\t5\t6\r\n"] {
            assert_eq!(read(text, &one).unwrap()[0].shape, [2, 3], "{text}");
        }
    }

    #[test]
    fn each_fault_is_told_with_its_place() {
        let one = [("x", DataType::Int32, &[-1, 2][..])];
        let two = [("x", DataType::Int32, &[-1][..]), ("y", DataType::Int32, &[-1])];
        for (text, inputs, said) in [
            (
                "a,b\n1,2\n3,x\n",
                &one[..],
                "a.csv: row 3, column 'b': input 'x' wants INT32 [rows, 2]: 'x' is no such number",
            ),
            (
                "1,2\n3,4000000000\n",
                &one,
                "row 2, column 2: input 'x' wants INT32 [rows, 2]: '4000000000' is out of its range",
            ),
            ("1,2\n3\n", &one, "a.csv: line 2 has 1 cells, but the first line has 2"),
            ("1,2,3\n", &one, "input 'x' wants INT32 [rows, 2], but a.csv has INT32 [1, 3]"),
            ("a,b\n", &one, "a.csv has no rows after its header"),
            ("", &one, "a.csv has no rows"),
            ("a,b\n1,2\n", &two, "names no input"),
        ] {
            let error = format!("{:#}", read(text, inputs).unwrap_err());
            assert!(error.contains(said), "{text:?}: {error}");
        }
    }
}
