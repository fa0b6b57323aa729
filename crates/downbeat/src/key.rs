//! An option of `downbeat serve`: where it is said, how its value is written, where that goes, and what it is for.

use downbeat_server::options::ModelOptions;

use crate::draft::Draft;
use crate::forms::{Form, Given, switch};

/// How often a flag's value is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arity {
    /// Once.
    One,
    /// Once, or left out for `true`.
    Optional,
    /// As often as one likes, and several divided by commas.
    Many,
    /// As [`Arity::Many`], but commas are part of the value.
    Repeated,
    /// Never: the flag alone says it.
    Bare,
}

type Set<D> = Box<dyn Fn(&mut D, &Given<'_>) -> Result<(), String> + Send + Sync>;

/// An option, which goes to a `D`.
pub struct Key<D> {
    /// Its path in `downbeat.toml`; empty: it is a flag alone.
    pub path: &'static str,
    /// Its flag, without the dashes; empty: it is in files alone.
    pub flag: &'static str,
    /// Other names of the flag, which are Triton's.
    pub alias: &'static str,
    /// Over which group it is listed.
    pub heading: &'static str,
    /// What it is for.
    pub help: String,
    /// What stands for the value in `--help`.
    pub unit: &'static str,
    /// What values there are.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the pages, which a test writes"))]
    pub values: String,
    /// The names of them, where there are only these.
    pub choices: Vec<&'static str>,
    /// The default as in a file; empty: there is none.
    pub default: String,
    /// What holds where nothing is said and there is no default.
    pub without: &'static str,
    /// A value where there is no default, as in a file.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the pages, which a test writes"))]
    pub example: &'static str,
    /// How often the flag's value is there.
    pub arity: Arity,
    /// Not shown: it is there for Triton's users, or for older files.
    pub is_hidden: bool,
    /// About models: it may come in a file that lies with them.
    pub is_of_models: bool,
    /// Sets it.
    pub set: Set<D>,
}

impl<D> std::fmt::Debug for Key<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.path, self.flag)
    }
}

/// A key whose value goes to a place.
pub fn key<T: 'static>(path: &'static str, form: Form<T>, place: fn(&mut Draft) -> &mut T) -> Key<Draft> {
    let default = (form.write)(place(&mut Draft::default()));
    Key { default, path, ..flag("", form, move |draft, value| *place(draft) = value) }
}

/// A key of what may be left out; `without` says what holds then.
pub fn optional<T: 'static>(
    path: &'static str,
    form: Form<T>,
    place: fn(&mut Draft) -> &mut Option<T>,
    without: &'static str,
    example: &'static str,
) -> Key<Draft> {
    Key { path, without, example, ..flag("", form, move |draft, value| *place(draft) = Some(value)) }
}

/// As [`optional`], of one model.
pub fn of_model<T: 'static>(
    path: &'static str,
    form: Form<T>,
    place: fn(&mut ModelOptions) -> &mut Option<T>,
    without: &'static str,
    example: &'static str,
) -> Key<ModelOptions> {
    Key { path, without, example, ..flag("", form, move |model, value| *place(model) = Some(value)) }
}

/// A flag that is no key.
pub fn flag<D, T: 'static>(
    flag: &'static str,
    form: Form<T>,
    set: impl Fn(&mut D, T) + Send + Sync + 'static,
) -> Key<D> {
    let Form { unit, values, choices, is_list, read, .. } = form;
    Key {
        path: "",
        flag,
        alias: "",
        heading: "",
        help: String::new(),
        unit,
        values,
        choices,
        default: String::new(),
        without: "",
        example: "",
        arity: if is_list { Arity::Many } else { Arity::One },
        is_hidden: false,
        is_of_models: false,
        set: Box::new(move |draft, given| read(given).map(|value| set(draft, value))),
    }
}

/// A flag without a value.
pub fn bare(name: &'static str, help: &str, set: fn(&mut Draft)) -> Key<Draft> {
    Key { arity: Arity::Bare, ..flag(name, switch(), move |draft, _| set(draft)).help(help) }
}

/// A flag of Triton that means something here.
pub fn triton<T: 'static>(name: &'static str, form: Form<T>, set: fn(&mut Draft, T)) -> Key<Draft> {
    Key { is_hidden: true, ..flag(name, form, set) }
}

impl<D> Key<D> {
    /// What it is for.
    pub fn help(self, help: impl Into<String>) -> Self {
        Key { help: help.into(), ..self }
    }

    /// Its flag, and what it is for.
    pub fn flag(self, flag: &'static str, help: impl Into<String>) -> Self {
        Key { flag, ..self.help(help) }
    }

    /// Another name of the flag.
    pub fn alias(self, alias: &'static str) -> Self {
        Key { alias, ..self }
    }

    /// What holds where nothing is said, and a value; the default is not shown.
    pub fn unless(self, without: &'static str, example: &'static str) -> Self {
        Key { without, example, ..self }
    }

    /// It may come in a file that lies with models.
    pub fn of_models(self) -> Self {
        Key { is_of_models: true, ..self }
    }

    /// How often the flag's value is there.
    pub fn arity(self, arity: Arity) -> Self {
        Key { arity, ..self }
    }

    /// The variable that says the same; empty: none does.
    pub fn variable(&self) -> String {
        match self.is_hidden || self.flag.is_empty() || self.arity == Arity::Bare {
            true => String::new(),
            false => format!("DOWNBEAT_{}", self.flag.to_uppercase().replace('-', "_")),
        }
    }
}
