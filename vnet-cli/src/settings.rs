//! Arguments of `vnet interface add`, `vnet link add` and `vnet route add`, derived from the declarations of the settings: every
//! key of the configuration file is an argument, with `-` for `_`.

use std::fmt::Write;
use std::marker::PhantomData;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use serde_json::{Map, Value};
use vnet_control::settings::{Applies, Described, INTERFACE, LINK, ROUTE, Takes, plain};

/// Objects that commands add.
pub trait Object {
    /// The keys of the object.
    fn keys() -> Vec<Described>;
}

/// `[[interface]]`
pub struct Interface;
/// `[[link]]`
pub struct Link;
/// `[[route]]`
pub struct Route;

impl Object for Interface {
    fn keys() -> Vec<Described> {
        INTERFACE.described()
    }
}

impl Object for Link {
    fn keys() -> Vec<Described> {
        LINK.described()
    }
}

impl Object for Route {
    fn keys() -> Vec<Described> {
        ROUTE.described()
    }
}

/// The settings given for a new object.
pub struct New<T>(Map<String, Value>, PhantomData<T>);

impl<T> New<T> {
    /// Name of the object.
    pub fn name(&self) -> &str {
        self.0.get("name").and_then(Value::as_str).unwrap_or_default()
    }

    /// The body of the request.
    pub fn request(&self) -> Value {
        self.0.clone().into()
    }
}

/// A flag that is off by default takes no value on the command line.
fn is_switch(described: &Described) -> bool {
    described.key.takes == Takes::Flag && described.default == Some(false.into())
}

fn argument(described: &Described) -> Arg {
    let key = &described.key;
    let mut help = described.help.clone();
    if let Takes::Words(words) = key.takes {
        write!(help, ": {}", words.join(", ")).expect("a String takes all");
    }
    let absent = match &described.default {
        _ if key.needed.is_some() || is_switch(described) => String::new(),
        Some(value) => plain(value),
        None => key.absent.into(),
    };
    if !absent.is_empty() {
        write!(help, " [default: {absent}]").expect("a String takes all");
    }
    let argument = Arg::new(key.name).help(help);
    if key.name == "name" {
        return argument.value_name("NAME").required(true);
    }
    let needed = key.needed.is_some() && key.only_for.is_empty();
    let mut argument = argument.long(key.name.replace('_', "-")).required(needed).requires_all(key.requires);
    if let Some(other) = key.unless {
        argument = argument.required_unless_present(other);
    }
    if let Some(other) = key.conflicts {
        argument = argument.conflicts_with(other);
    }
    match key.takes {
        Takes::Flag if is_switch(described) => argument.action(ArgAction::SetTrue),
        Takes::Flag => argument.value_name("BOOL").value_parser(value_parser!(bool)),
        Takes::Number(..) => argument.value_name("N").value_parser(number(described)),
        Takes::Numbers(..) => {
            let argument = argument.value_name("N,N").value_parser(number(described));
            argument.value_delimiter(',').action(ArgAction::Append)
        }
        Takes::Texts(name) => argument.value_name(name).value_delimiter(',').action(ArgAction::Append),
        Takes::Text(name) => argument.value_name(name),
        Takes::Words(_) => argument.value_name("WORD"),
    }
}

/// Parses a whole number. vnetd checks the limits.
fn number(described: &Described) -> impl Fn(&str) -> Result<u32, String> + Clone + Send + Sync + 'static {
    let (unit, takes) = (described.key.unit, described.key.takes);
    move |text| {
        text.parse().map_err(|_| {
            let unit = if unit.is_empty() { String::new() } else { format!(" of {unit}") };
            match takes {
                Takes::Number(least, most) | Takes::Numbers(least, most) if most < i32::MAX as u32 => {
                    format!("write a whole number{unit} from {least} to {most}, without a unit")
                }
                _ => format!("write a whole number{unit}, without a unit"),
            }
        })
    }
}

/// The value of an argument; `None` if it was not given.
fn given(described: &Described, matches: &ArgMatches) -> Option<Value> {
    let name = described.key.name;
    let texts = || matches.get_many::<String>(name).map(|texts| texts.cloned().collect::<Vec<_>>().into());
    match described.key.takes {
        Takes::Flag if is_switch(described) => matches.get_flag(name).then_some(true.into()),
        Takes::Flag => matches.get_one::<bool>(name).map(|flag| (*flag).into()),
        Takes::Number(..) => matches.get_one::<u32>(name).map(|number| (*number).into()),
        Takes::Numbers(..) => matches.get_many::<u32>(name).map(|n| n.copied().collect::<Vec<_>>().into()),
        Takes::Texts(_) => texts(),
        Takes::Text(_) | Takes::Words(_) => matches.get_one::<String>(name).map(|text| text.clone().into()),
    }
}

impl<T: Object> Args for New<T> {
    fn augment_args(command: Command) -> Command {
        command.args(T::keys().iter().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        New::<T>::augment_args(command)
    }
}

impl<T: Object> FromArgMatches for New<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<New<T>, clap::Error> {
        let keys = T::keys();
        let given = keys.iter().filter_map(|key| Some((key.key.name.to_string(), given(key, matches)?)));
        Ok(New(given.collect(), PhantomData))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = New::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Help with the keys that `vnet interface set` accepts.
pub fn set_help() -> String {
    let live: Vec<_> = INTERFACE.described().into_iter().filter(|key| key.applies == Applies::Live).collect();
    let width = live.iter().map(|key| key.key.name.len()).max().unwrap_or(0);
    let mut text = "Keys, as in the configuration file:\n".to_string();
    for Described { key, help, .. } in live {
        let words =
            if let Takes::Words(words) = key.takes { format!(": {}", words.join(", ")) } else { "".into() };
        writeln!(text, "  {:width$}  {help}{words}", key.name).expect("a String takes all");
    }
    text + "\nExample:\n  vnet interface set vm1 mode=adaptive rate_high=20000 interrupts=optimistic"
}
